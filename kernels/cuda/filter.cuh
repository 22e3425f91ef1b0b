// One pass over the data: r = r + x, and every entry whose key is at least `threshold`, in order of index.
#pragma once

#include "load.cuh"
#include "lookback.cuh"

namespace sparsecomm {

constexpr u64 NOT_LAST_TILE = ~0ull;
constexpr u64 FILTER_TILE = u64(FILTER_THREADS) * FILTER_VECTORS * VECTOR;  // elements

// Blocks per multiprocessor: as many as leave registers for what a thread holds. Sums of 16-bit floats need the most.
constexpr u32 FILTER_BLOCKS = RESIDUAL && sizeof(AccBits) == 2 ? 2 : sizeof(Group<AccBits>) > sizeof(Vector) ? 3 : 4;

// Filters one tile of FILTER_TILE elements, and calls take(position, index, bits) for its entries: those whose key is at
// least `threshold`. Returns the number of entries of the whole vector in the block of the last tile, NOT_LAST_TILE in
// others. All threads of all blocks call it, once; `reset_after_last_block` must follow.
//
//   x          [in]      n elements; may be null beside a residual
//   residual   [in,out]  n elements, r = r + x; 0 at the entries taken. Not used unless RESIDUAL
//   aligned    [in]      whether both are at a multiple of 16 bytes
//   capacity   [in]      entries; those from this position on are not taken, and stay in the residual
//   look_back  [in,out]  see lookback.cuh
template <class Take>
DEVICE u64 filter_tile(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, LookBack* look_back,
                     Take take) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 tile = tile_ticket(look_back);
    // A warp has FILTER_VECTORS rows of groups, one after another; a row has a group per lane.
    const u64 first = tile * FILTER_TILE + u64(warp * FILTER_VECTORS * WARP + lane) * VECTOR;
    Group<AccBits> group[FILTER_VECTORS];
    u32 taken[FILTER_VECTORS];   // bit e: element e is an entry
    u32 before[FILTER_VECTORS];  // entries of this warp before this group
    u32 count = 0;              // of this warp
    UNROLL
    for (u32 c = 0; c < FILTER_VECTORS; c++)
        group[c] = accumulated(x, residual, first + c * WARP * VECTOR, n, aligned);
    UNROLL
    for (u32 c = 0; c < FILTER_VECTORS; c++) {
        taken[c] = 0;
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) taken[c] |= u32(key_of(group[c].get(e)) >= threshold) << e;
        before[c] = count;
        if (__any_sync(ALL_LANES, taken[c] != 0)) {
            const u32 mine = u32(__popc(taken[c])), inclusive = warp_scan(mine);
            before[c] += inclusive - mine;
            count += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
        }
#if RESIDUAL
        Group<AccBits> rest = group[c];
        UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            if (taken[c] >> e & 1) rest.set(e, 0);
        store_group(residual, first + c * WARP * VECTOR, n, aligned, rest);
#endif
    }
    u32 all;
    const u32 warps_before = block_scan<FILTER_THREADS>(lane == 0 ? count : 0u, &all);
    const u64 tiles_before = exclusive_prefix(look_back, tile, all);
    const u64 base = tiles_before + __shfl_sync(ALL_LANES, warps_before, 0);
    UNROLL
    for (u32 c = 0; c < FILTER_VECTORS; c++) {
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
    return tile == gridDim.x - 1 ? tiles_before + all : NOT_LAST_TILE;
}

}  // namespace sparsecomm
