// One pass over the data: r = r + x, and every entry whose key is at least `threshold`, in order of index.
//
// A warp reads its part of a tile in rounds, without waiting for other warps, and keeps the entries in shared memory until
// `compact_tiles` knows their position. Entries that find no room there are read again. With fewer rounds, the same room is
// for fewer elements: the launch code chooses the rounds by the density.
#pragma once

#include "compact.cuh"

namespace sparsecomm {

constexpr u32 FILTER_WARPS = FILTER_THREADS / WARP;
constexpr u32 FILTER_ROUND = FILTER_VECTORS * ROW;           // elements that a warp loads in a round
constexpr u32 ROOM = FILTER_ROUNDS * FILTER_ROUND * 5 / 64;  // entries of a warp's part: see `_filter_rounds` in selection.py
static_assert(FILTER_WARPS * FILTER_ROUNDS * FILTER_ROUND <= 1u << 16, "positions within a tile have 16 bits");

// Blocks per multiprocessor, limited by registers per thread. Sums with 16-bit floats need the most.
constexpr u32 FILTER_BLOCKS = sizeof(Group<AccBits>) > sizeof(Vector) ? 2 : RESIDUAL && sizeof(XBits) == 2 ? 3 : 4;

// Entries of each warp's part of a tile, in shared memory.
struct Waiting {
    u32 stored[FILTER_WARPS];    // number of entries here; later ones found no room
    u16 at[FILTER_WARPS][ROOM];  // positions within the tile
    AccBits bits[FILTER_WARPS][ROOM];
};

// Reads a warp's part of a tile, adds x to the residual, and stores entries in `waiting` while there is room for those of a
// round, setting them to 0 in the residual. Returns the number of all entries. All lanes call it.
DEVICE u32 read_part(const XBits* x, AccBits* residual, u64 n, bool aligned, AccBits min_magnitude, u32 rounds, u64 tile_begin,
                     u32 warp, Waiting& waiting) {
    const u32 lane = threadIdx.x % WARP;
    u32 begin = warp * rounds * FILTER_ROUND, count = 0, stored = 0;
    for (u32 round = 0; round < rounds; round++, begin += FILTER_ROUND) {
        if (tile_begin + begin >= n) break;
        const u32 mine = begin + lane * VECTOR;
        const bool whole = aligned && tile_begin + begin + FILTER_ROUND <= n;
        Group<AccBits> group[FILTER_VECTORS];
        accumulate<FILTER_VECTORS, ROW>(group, x, residual, tile_begin + mine, n, aligned, whole);
        const RowEntries<FILTER_VECTORS> entries(group, min_magnitude);
        const u32 found = entries.count();
        if (count + found <= ROOM) {
            entries.store<true>(waiting.bits[warp], waiting.at[warp], count, [&](AccBits* bits, u16* at, u32 r, u32 e) {
                *bits = group[r].get(e);
                *at = u16(mine + r * ROW + e);
                group[r].set(e, 0);
            });
            stored = count + found;
        }
        count += found;
#if RESIDUAL
        UNROLL
        for (u32 r = 0; r < FILTER_VECTORS; r++)
            store_group(residual, tile_begin + mine + r * ROW, whole ? ~0ull : n, aligned, group[r]);
#endif
    }
    if (lane == 0) waiting.stored[warp] = stored;
    return count;
}

// Calls take(position, index, bits) for the entries of a warp's part of a tile, with positions from `base`: the
// waiting entries, and those beyond the room. All lanes call it.
template <class Take>
DEVICE void write_part(const XBits* x, AccBits* residual, u64 n, bool aligned, AccBits min_magnitude, u32 rounds, u64 tile_begin,
                       u32 warp, const Waiting& waiting, u32 count, u64 base, u64 capacity, Take take) {
    const u32 lane = threadIdx.x % WARP, stored = waiting.stored[warp];
    if (count > stored && base + stored < capacity) {  // first: below, entries beyond `capacity` return to the residual
#if RESIDUAL
        const AccBits* data = residual;
        u64 to = base + stored;
#else
        const AccBits* data = x;
        u64 to = base;
#endif
        for (u32 row = 0; row < rounds * FILTER_VECTORS; row++) {
            const u64 i = tile_begin + (warp * rounds * FILTER_VECTORS + row) * ROW + lane * VECTOR;
            const Group<AccBits> group = load_group(data, i, n, aligned);
            const u32 entries = entries_of(group, min_magnitude), mine = u32(__popc(entries)), inclusive = warp_scan(mine);
            u64 own = to + inclusive - mine;
            UNROLL
            for (u32 e = 0; e < VECTOR; e++) {
                const bool taken = (entries >> e & 1) && own >= base + stored && own < capacity;
                if (taken) {
                    take(own, i + e, group.get(e));
#if RESIDUAL
                    residual[i + e] = 0;
#endif
                }
                own += entries >> e & 1;
            }
            to += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
        }
    }
    for (u32 w = lane; w < stored; w += WARP) {
        const u64 i = tile_begin + waiting.at[warp][w];
        const AccBits bits = waiting.bits[warp][w];
        if (base + w < capacity) take(base + w, i, bits);
#if RESIDUAL
        else residual[i] = bits;
#endif
    }
    __syncwarp();  // lanes that are ahead change `waiting`
}

DEVICE u64 filter_tile(u32 rounds) { return u64(FILTER_WARPS) * rounds * FILTER_ROUND; }
DEVICE u32 filter_tile_count(u64 n, u32 rounds) { return u32((n + filter_tile(rounds) - 1) / filter_tile(rounds)); }

// Filters all tiles, and calls take(position, index, bits) for every entry whose key is at least `threshold`. Returns the
// number of entries of the whole vector in the block that had the last tile, and NOT_LAST_TILE in other blocks. All threads of
// all blocks call it once; `reset_after_last_block` must follow.
//
//   x          [in]      n elements; with RESIDUAL may be null, to filter the residual unchanged
//   residual   [in,out]  n elements, r = r + x, with 0 at the entries taken. Not used unless RESIDUAL
//   aligned    [in]      whether the addresses of both are multiples of 16
//   capacity   [in]      maximum entries taken; later ones remain in the residual
//   rounds     [in]      rounds in which a warp reads its part of a tile, from 1 to FILTER_ROUNDS
//   look_back  [in,out]  see lookback.cuh
template <class Take>
DEVICE u64 filter_tiles(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, u32 rounds,
                        LookBack* look_back, Take take) {
    struct Both {
        Waiting of[2];
    };
    SHARED(Both, waiting);
    const u32 warp = threadIdx.x / WARP;
    const AccBits none = magnitude_mask<AccBits> + 1, min_magnitude = threshold < none ? AccBits(threshold) : none;
    const auto read = [&](u32 tile, u32 turn) {
        return read_part(x, residual, n, aligned, min_magnitude, rounds, tile * filter_tile(rounds), warp, waiting.of[turn]);
    };
    const auto write = [&](u32 tile, u32 turn, u32 count, u64 position) {
        write_part(x, residual, n, aligned, min_magnitude, rounds, tile * filter_tile(rounds), warp, waiting.of[turn], count,
                   position, capacity, take);
    };
    return compact_tiles<FILTER_THREADS>(look_back, filter_tile_count(n, rounds), read, write);
}

}  // namespace sparsecomm
