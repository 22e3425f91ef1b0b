// One pass over the data: r = r + x, and every entry whose key is at least `threshold`, in order of index.
//
// A block takes one tile after another. A warp reads its part of a tile in rounds, without waiting for other warps, and
// keeps the entries in shared memory, with room for one of ROOM_PER elements. Their position is known when all earlier tiles
// have been read. So they wait while the block reads its next tile; by then the position is usually known. Entries beyond
// the room are read again.
#pragma once

#include "load.cuh"
#include "lookback.cuh"

namespace sparsecomm {

constexpr u64 NOT_LAST_TILE = ~0ull;
constexpr u32 FILTER_WARPS = FILTER_THREADS / WARP;
constexpr u32 FILTER_ROW = WARP * VECTOR;                                 // elements that a warp loads at once
constexpr u32 FILTER_PART = FILTER_ROUNDS * FILTER_VECTORS * FILTER_ROW;  // elements of a warp in a tile
constexpr u64 FILTER_TILE = u64(FILTER_WARPS) * FILTER_PART;
constexpr u32 ROOM_PER = 16, ROOM = FILTER_PART / ROOM_PER;

// Blocks per multiprocessor, limited by registers per thread. Sums with 16-bit floats need the most.
constexpr u32 FILTER_BLOCKS = RESIDUAL && sizeof(XBits) == 2 ? 2 : sizeof(Group<AccBits>) > sizeof(Vector) ? 3 : 4;

// Entries of each warp's part of a tile, in shared memory.
struct Waiting {
    u32 at[FILTER_WARPS][ROOM];  // positions within the tile
    AccBits bits[FILTER_WARPS][ROOM];
};

// Returns a mask: bit e is set if the magnitude of element e is at least `min_magnitude`.
DEVICE u32 entries_of(const Group<AccBits>& group, AccBits min_magnitude) {
    u32 taken = 0;
    UNROLL
    for (u32 e = 0; e < VECTOR; e++) taken |= u32(magnitude(group.get(e)) >= min_magnitude) << e;
    return taken;
}

// Reads a warp's part of a tile, adds x to the residual, and stores entries in `at` and `bits` while there is room, setting
// them to 0 in the residual. Returns the number of all entries. All lanes call it.
DEVICE u32 read_part(const XBits* x, AccBits* residual, u64 n, bool aligned, AccBits min_magnitude, u64 tile_begin, u32 begin,
                     u32* at, AccBits* bits) {
    const u32 lane = threadIdx.x % WARP;
    constexpr u32 ROUND = FILTER_VECTORS * FILTER_ROW;
    u32 count = 0;
    for (u32 round = 0; round < FILTER_ROUNDS; round++, begin += ROUND) {
        if (tile_begin + begin >= n) break;
        const u64 first = tile_begin + begin + lane * VECTOR;
        const bool whole = aligned && tile_begin + begin + ROUND <= n;
        Group<AccBits> group[FILTER_VECTORS];
        accumulate<FILTER_VECTORS, FILTER_ROW>(group, x, residual, first, n, aligned, whole);
        UNROLL
        for (u32 c = 0; c < FILTER_VECTORS; c++) {
            const u32 taken = entries_of(group[c], min_magnitude);
            if (__any_sync(ALL_LANES, taken != 0)) {
                const u32 mine = u32(__popc(taken)), inclusive = warp_scan(mine);
                u32 to = count + inclusive - mine;
                UNROLL
                for (u32 e = 0; e < VECTOR; e++) {
                    if (!(taken >> e & 1)) continue;
                    if (to < ROOM) {
                        at[to] = begin + c * FILTER_ROW + lane * VECTOR + e;
                        bits[to] = group[c].get(e);
                        group[c].set(e, 0);
                    }
                    to++;
                }
                count += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
            }
#if RESIDUAL
            store_group(residual, first + c * FILTER_ROW, whole ? ~0ull : n, aligned, group[c]);
#endif
        }
    }
    return count;
}

// Calls take(position, index, bits) for the entries of a warp's part of a tile, with positions from `base`: the waiting
// entries, and those beyond the room. All lanes call it.
template <class Take>
DEVICE void write_part(const XBits* x, AccBits* residual, u64 n, bool aligned, AccBits min_magnitude, u64 tile_begin, u32 begin,
                       const u32* at, const AccBits* bits, u32 count, u64 base, u64 capacity, Take take) {
    const u32 lane = threadIdx.x % WARP;
    if (count > ROOM && base + ROOM < capacity) {  // before waiting entries beyond `capacity` return to the residual
#if RESIDUAL
        const AccBits* data = residual;
        u64 to = base + ROOM;
#else
        const AccBits* data = x;
        u64 to = base;
#endif
        for (u32 row = 0; row < FILTER_ROUNDS * FILTER_VECTORS; row++) {
            const u64 i = tile_begin + begin + row * FILTER_ROW + lane * VECTOR;
            const Group<AccBits> group = load_group(data, i, n, aligned);
            const u32 taken = entries_of(group, min_magnitude), mine = u32(__popc(taken)), inclusive = warp_scan(mine);
            u64 own = to + inclusive - mine;
            UNROLL
            for (u32 e = 0; e < VECTOR; e++) {
                if (!(taken >> e & 1)) continue;
                if (own >= base + ROOM && own < capacity) {
                    take(own, i + e, group.get(e));
#if RESIDUAL
                    residual[i + e] = 0;
#endif
                }
                own++;
            }
            to += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
        }
    }
    for (u32 w = lane; w < count && w < ROOM; w += WARP) {
        if (base + w < capacity) take(base + w, tile_begin + at[w], bits[w]);
#if RESIDUAL
        else residual[tile_begin + at[w]] = bits[w];
#endif
    }
}

DEVICE u32 filter_tile_count(u64 n) { return u32((n + FILTER_TILE - 1) / FILTER_TILE); }

// Filters all tiles, and calls take(position, index, bits) for every entry whose key is at least `threshold`. Returns the
// number of entries of the whole vector in the block that had the last tile, and NOT_LAST_TILE in other blocks. All threads
// of all blocks call it once; `reset_after_last_block` must follow.
//
//   x          [in]      n elements; with RESIDUAL may be null, to filter the residual unchanged
//   residual   [in,out]  n elements, r = r + x, with 0 at the entries taken. Not used unless RESIDUAL
//   aligned    [in]      whether the addresses of both are multiples of 16
//   capacity   [in]      maximum entries taken; later ones remain in the residual
//   look_back  [in,out]  see lookback.cuh
template <class Take>
DEVICE u64 filter_tiles(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, LookBack* look_back,
                        Take take) {
    struct Both {
        Waiting of[2];
    };
    SHARED(Both, waiting);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, begin = warp * FILTER_PART, tiles = filter_tile_count(n);
    const AccBits none = magnitude_mask<AccBits> + 1, min_magnitude = threshold < none ? AccBits(threshold) : none;
    u64 total = NOT_LAST_TILE;
    u32 turn = 0, last_tile = tiles, last_count = 0, last_before = 0, last_all = 0;  // of the tile with waiting entries
    while (true) {
        const u32 tile = tile_ticket(look_back);
        Waiting& here = waiting.of[turn];
        u32 count = 0, before = 0, all = 0;
        if (tile < tiles) {
            count = read_part(x, residual, n, aligned, min_magnitude, tile * FILTER_TILE, begin, here.at[warp],
                              here.bits[warp]);
            before = block_scan<FILTER_THREADS>(lane == 0 ? count : 0u, &all);
            before = __shfl_sync(ALL_LANES, before, 0);
            if (threadIdx.x == 0) publish(look_back, tile, all);
        }
        turn ^= 1;
        if (last_tile < tiles) {
            const u64 tiles_before = prefix_before(look_back, last_tile, last_all);
            Waiting& there = waiting.of[turn];
            write_part(x, residual, n, aligned, min_magnitude, last_tile * FILTER_TILE, begin, there.at[warp],
                       there.bits[warp], last_count, tiles_before + last_before, capacity, take);
            if (last_tile == tiles - 1) total = tiles_before + last_all;
        }
        if (tile >= tiles) return total;
        last_tile = tile, last_count = count, last_before = before, last_all = all;
    }
}

}  // namespace sparsecomm
