// Compaction that keeps the order, in one pass: decoupled look-back (Merrill & Garland, 2016).
//
// Blocks take tiles by ticket, so a tile's predecessors are always running or done, and publish first the count of
// their own tile, then the sum up to it. A tile's sum of all before it comes from looking back over these words. Each
// word is written whole, with its flag, and nothing else is published by it: relaxed loads and stores will do.
//
// Between kernels the state is all zeros: the last block to leave clears it.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

struct LookBack {
    u32 ticket;  // tiles taken
    u32 left;    // blocks that are done
    u64 status[1];  // of each tile: 0, or OWN and its count, or UPTO and the sum up to it
};

constexpr u64 OWN = 1ull << 62, UPTO = 2ull << 62, SUM = OWN - 1;  // sums have 62 bits

// The tile of this block. All threads call it.
DEVICE u32 tile_ticket(LookBack* state) {
    SHARED(u32, tile);
    if (threadIdx.x == 0) tile = atomicAdd(&state->ticket, 1u);
    __syncthreads();
    return tile;
}

// The sum over all tiles before `tile`, of which this one adds `own`. All threads call it.
DEVICE u64 exclusive_prefix(LookBack* state, u32 tile, u64 own) {
    SHARED(u64, base);
    if (threadIdx.x < WARP) {
        const u32 lane = threadIdx.x;
        if (lane == 0) store_relaxed(&state->status[tile], (tile == 0 ? UPTO : OWN) | own);
        u64 before = 0;
        for (i64 end = tile; end > 0; end -= WARP) {  // a window of tiles, lane 0 the nearest
            const i64 t = end - 1 - i64(lane);
            u64 word = t < 0 ? UPTO : load_relaxed(&state->status[t]);
            while (__any_sync(ALL_LANES, word == 0)) {
                pause();
                if (word == 0) word = load_relaxed(&state->status[t]);
            }
            const u32 upto = __ballot_sync(ALL_LANES, word >= UPTO);
            const u32 last = upto ? u32(__ffs(int(upto))) - 1 : WARP - 1;
            before += warp_sum(lane <= last ? word & SUM : 0ull);
            if (upto) break;
        }
        if (lane == 0) {
            if (tile > 0) store_relaxed(&state->status[tile], UPTO | (before + own));
            base = before;
        }
    }
    __syncthreads();
    return base;
}

// Whether this block is the last one of the grid to come here; it then sees what all others wrote before they came.
// All threads call it. `left` is 0 again afterwards.
DEVICE bool is_last_block(u32* left) {
    SHARED(bool, last);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(left, 1u) == gridDim.x - 1;
        if (last) *left = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The end of a kernel that took `tiles` tiles: true in the last block, which leaves the state as it was found.
DEVICE bool leave(LookBack* state, u32 tiles) {
    if (!is_last_block(&state->left)) return false;
    for (u32 t = threadIdx.x; t < tiles; t += blockDim.x) state->status[t] = 0;
    if (threadIdx.x == 0) state->ticket = 0;
    return true;
}

}  // namespace sparsecomm
