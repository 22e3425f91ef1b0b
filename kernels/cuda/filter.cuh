// One pass over the data: r = r + x, and every entry whose key is at least `threshold`, in order of index.
#pragma once

#include "load.cuh"
#include "lookback.cuh"

namespace sparsecomm {

constexpr u64 NOT_LAST = ~0ull;
constexpr u64 FILTER_TILE = u64(FILTER_THREADS) * FILTER_CHUNKS * VECTOR;  // elements

// Blocks of a multiprocessor: as many as leave registers for what a thread holds. Sums of 16-bit floats need most.
constexpr u32 FILTER_BLOCKS = RESIDUAL && sizeof(AccBits) == 2 ? 2 : sizeof(Group<AccBits>) > sizeof(Chunk) ? 3 : 4;

// One tile of FILTER_THREADS * FILTER_CHUNKS chunks: `take(place, index, bits)` for its entries, of which the residual
// keeps none; of those from place `capacity` on it keeps all. Returns the number of entries of the whole vector in the
// block of the last tile, and NOT_LAST in others. All threads of all blocks call it, once; `leave` must follow.
template <class Take>
DEVICE u64 take_from(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, LookBack* tiles,
                     Take take) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 tile = tile_ticket(tiles);
    // A warp has FILTER_CHUNKS rows of chunks, one after another; a row has a chunk per lane.
    const u64 first = tile * FILTER_TILE + u64(warp * FILTER_CHUNKS * WARP + lane) * VECTOR;
    Group<AccBits> group[FILTER_CHUNKS];
    u32 taken[FILTER_CHUNKS];   // bit e: element e is an entry
    u32 before[FILTER_CHUNKS];  // entries of this warp before this chunk
    u32 count = 0;              // of this warp
    UNROLL
    for (u32 c = 0; c < FILTER_CHUNKS; c++)
        group[c] = accumulated(x, residual, first + c * WARP * VECTOR, n, aligned);
    UNROLL
    for (u32 c = 0; c < FILTER_CHUNKS; c++) {
        taken[c] = 0;
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) taken[c] |= u32(key_of(group[c].get(e)) >= threshold) << e;
        before[c] = count;
        if (__any_sync(ALL_LANES, taken[c] != 0)) {
            const u32 mine = u32(__popc(taken[c])), upto = warp_scan(mine);
            before[c] += upto - mine;
            count += __shfl_sync(ALL_LANES, upto, WARP - 1);
        }
#if RESIDUAL
        Group<AccBits> left = group[c];
        UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            if (taken[c] >> e & 1) left.set(e, 0);
        store_group(residual, first + c * WARP * VECTOR, n, aligned, left);
#endif
    }
    u32 all;
    const u32 warps_before = block_scan<FILTER_THREADS>(lane == 0 ? count : 0u, &all);
    const u64 tiles_before = exclusive_prefix(tiles, tile, all);
    const u64 base = tiles_before + __shfl_sync(ALL_LANES, warps_before, 0);
    UNROLL
    for (u32 c = 0; c < FILTER_CHUNKS; c++) {
        u64 to = base + before[c];
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            if (!(taken[c] >> e & 1)) continue;
            const u64 i = first + c * WARP * VECTOR + e;
            if (to < capacity) take(to, i, group[c].get(e));
#if RESIDUAL
            else residual[i] = group[c].get(e);
#endif
            to++;
        }
    }
    return tile == gridDim.x - 1 ? tiles_before + all : NOT_LAST;
}

}  // namespace sparsecomm
