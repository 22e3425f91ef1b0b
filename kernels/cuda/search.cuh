// The place of a thread in a grid, and of an index among ascending indices.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

DEVICE u64 grid_thread() { return u64(blockIdx.x) * DENSE_THREADS + threadIdx.x; }
DEVICE u64 grid_threads() { return u64(gridDim.x) * DENSE_THREADS; }

// Returns the position of the first of `count` indices that is at least `from`. All lanes of a warp call it; each step
// probes 32 positions.
template <class Index>
DEVICE u64 warp_lower_bound(const Index* indices, u64 count, u64 from) {
    const u32 lane = threadIdx.x % WARP;
    u64 low = 0, high = count;
    while (low < high) {
        const u64 step = (high - low + WARP - 1) / WARP, i = low + lane * step;
        const bool below = i < high && u64(indices[i]) < from;
        const u32 found = u32(__popc(__ballot_sync(ALL_LANES, below)));
        if (found == 0) return low;
        const u64 next = low + (found - 1) * step + 1;
        high = low + found * step < high ? low + found * step : high;
        low = next;
    }
    return low;
}

// As warp_lower_bound, by one thread.
template <class Index>
DEVICE u64 lower_bound(const Index* indices, u64 count, u64 from) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (u64(indices[middle]) < from)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

}  // namespace sparsecomm
