// Stable compaction by warps: entries of the rows that a warp has loaded, and tiles of a block of warps.
#pragma once

#include "load.cuh"
#include "lookback.cuh"

namespace sparsecomm {

constexpr u32 ROW = WARP * VECTOR;  // elements that a warp loads at once, VECTOR per lane
constexpr u64 NOT_LAST_TILE = ~0ull;

// Returns a mask: bit e is set if the magnitude of element e is at least `min_magnitude`.
DEVICE u32 entries_of(const Group<AccBits>& group, AccBits min_magnitude) {
    u32 taken = 0;
    UNROLL
    for (u32 e = 0; e < VECTOR; e++) taken |= u32(magnitude(group.get(e)) >= min_magnitude) << e;
    return taken;
}

template <u32 BYTES>
struct WordOf {
    using Type = u32;
};
template <>
struct WordOf<8> {
    using Type = u64;
};

// Numbers the entries of ROWS rows of a warp in order of index. One prefix sum counts all rows, each in a field of a word.
template <u32 ROWS>
struct RowEntries {
    static constexpr u32 FIELD = ROW < 256 ? 8 : 16;  // bits, for counts up to ROW
    using Word = typename WordOf<(ROWS * FIELD > 32 ? 8 : 4)>::Type;
    static_assert(ROWS * VECTOR <= 32, "one bit per element");
    u32 taken;        // bit r VECTOR + e: element e of this lane's group in row r is an entry
    Word before;      // entries of lower lanes, of each row
    Word all;         // entries of all lanes, of each row

    DEVICE RowEntries(const Group<AccBits> (&group)[ROWS], AccBits min_magnitude) : taken(0), before(0), all(0) {
        Word mine = 0;
        UNROLL
        for (u32 r = 0; r < ROWS; r++) {
            const u32 of_row = entries_of(group[r], min_magnitude);
            taken |= of_row << (r * VECTOR);
            mine |= Word(__popc(of_row)) << (r * FIELD);
        }
        if (!__any_sync(ALL_LANES, taken != 0)) return;
        const Word through = warp_scan(mine);
        before = through - mine;
        all = __shfl_sync(ALL_LANES, through, WARP - 1);
    }

    DEVICE static u32 field(Word word, u32 r) { return u32(word >> (r * FIELD)) & ((1u << FIELD) - 1); }

    // Returns the number of entries of all lanes.
    DEVICE u32 count() const {
        u32 sum = 0;
        UNROLL
        for (u32 r = 0; r < ROWS; r++) sum += field(all, r);
        return sum;
    }

    // Calls put(value, position, r, e) for this lane's entries: element e of row r. `put` writes the entry to the two
    // pointers, which point into `values` and `positions`. The first entry of the warp is at `first` in both arrays. FEW:
    // many rows have no entries.
    template <bool FEW, class Value, class Position, class Put>
    DEVICE void store(Value* values, Position* positions, u32 first, Put put) const {
        if (!taken) return;
        UNROLL
        for (u32 r = 0; r < ROWS; r++) {
            if (FEW && field(all, r) == 0) continue;
            Value* value = values + (first + field(before, r));  // pointers, since indices would need more instructions
            Position* position = positions + (first + field(before, r));
            UNROLL
            for (u32 e = 0; e < VECTOR; e++)
                if (taken >> (r * VECTOR + e) & 1) put(value++, position++, r, e);
            first += field(all, r);
        }
    }
};

// Compacts tiles in order. A block takes one tile after another: read(tile, turn) returns how many entries this warp has in
// it. Their position is known when all earlier tiles have been read. So they wait while the block reads its next tile; by
// then it is usually known, and write(tile, turn, count, position) writes them. `turn` alternates between 0 and 1.
//
// Returns the number of entries of all tiles in the block that had the last one, and NOT_LAST_TILE in other blocks. All
// threads of all blocks call it once; `reset_after_last_block` must follow.
template <u32 THREADS, class Read, class Write>
DEVICE u64 compact_tiles(LookBack* look_back, u32 tiles, Read read, Write write) {
    struct Tickets {
        u32 of[2];
    };
    SHARED(Tickets, next);
    u64 total = NOT_LAST_TILE;
    u32 tile = tile_ticket(look_back), last_tile = tiles, last_count = 0, last_before = 0, last_all = 0;
    for (u32 turn = 0;; turn ^= 1) {
        u32 count = 0, before = 0, all = 0, ticket = 0;
        if (tile < tiles) {
            if (threadIdx.x == 0) ticket = atomicAdd(&look_back->ticket, 1u);  // arrives while the block reads
            count = read(tile, turn);
            if (threadIdx.x == 0) next.of[turn] = ticket;
            before = block_scan<THREADS>(threadIdx.x % WARP == 0 ? count : 0u, &all);
            before = __shfl_sync(ALL_LANES, before, 0);
            if (threadIdx.x == 0) publish(look_back, tile, all);
        } else {
            __syncthreads();  // all threads have read the position of the tile before
        }
        if (last_tile < tiles) {
            const u64 tiles_before = prefix_before(look_back, last_tile, last_all);
            write(last_tile, turn ^ 1, last_count, tiles_before + last_before);
            if (last_tile == tiles - 1) total = tiles_before + last_all;
        }
        if (tile >= tiles) return total;
        last_tile = tile, last_count = count, last_before = before, last_all = all;
        tile = next.of[turn];
    }
}

}  // namespace sparsecomm
