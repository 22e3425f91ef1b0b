// The exact top-k by |v| of every chunk of a vector, in one pass: no search over the whole vector, so no threshold.
//
// Chunks begin at elements 0, chunk, 2 chunk, ...; the last one may be shorter. Order within a chunk: |v| descending,
// index ascending; the k-th and later ties lose. NaN is above infinity. Zeros are never selected: of fewer than k other
// entries all are. k above a chunk's elements selects as k = its elements. Entries come in order of index.
//
// Grid: one block per tile. A tile has as many whole chunks as its BY_CHUNK_THREADS * BY_CHUNK_ITEMS elements of shared memory
// hold. A warp selects from a chunk where there are as many chunks as warps, else the block does. A longer chunk is a tile
// of its own. What is selected from stays in the residual (or x) then, and is read again for each digit of keys, most of it
// from the L2: right for any length, fast for tiles.
//
// Reads x and the residual once and writes the residual once (f32: 4n bytes, with a residual 12n), and writes the entries.
// A team finds the k-th key by radix, from the top, in a histogram of 8 bins per thread: 3 passes over shared memory for
// the block, 4 for a warp (f32); fewer if all keys of a bin win. Deterministic: atomics count in shared memory, and counts
// do not depend on order. The place of a tile's entries comes from decoupled look-back.
#include "load.cuh"
#include "lookback.cuh"

using namespace sparsecomm;

namespace {

using Key = decltype(AccBits() + 0u);  // 32 bits or 64

constexpr u32 TILE = BY_CHUNK_THREADS * BY_CHUNK_ITEMS;  // elements
constexpr u32 ROW = BY_CHUNK_THREADS * VECTOR;        // elements that the block loads together
constexpr u32 WARPS = BY_CHUNK_THREADS / WARP;
constexpr u32 BINS_EACH = 8;  // per thread
constexpr u32 BINS_OF_BLOCK = BY_CHUNK_THREADS * BINS_EACH;
constexpr u32 KEY_BITS = sizeof(AccBits) * 8 - 1;
static_assert(TILE % ROW == 0, "whole rows");

DEVICE constexpr u32 log2_of(u32 power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// What a team finds out, for all its threads.
struct Found {
    u32 bin;
    u64 rank, count;  // within that bin; of its keys
    u64 ties_end;
};

// In shared memory.
struct Tile {
    union {
        alignas(16) AccBits bits[TILE];  // of all elements, as they are selected from
        u64 counts_of_many[BINS_OF_BLOCK];        // of a chunk that has no room here
    };
    u32 counts[BINS_OF_BLOCK];      // of keys, in the bins of each team
    Found found[WARPS];    // by each team
    unsigned char wins[TILE];
};

// The entries selected from a chunk: keys above `kth`, and those equal to it at positions before `ties_end`.
struct Winners {
    Key kth;
    u64 ties_end, count;

    DEVICE bool has(Key key, u64 position) const { return key > kth || (key == kth && position < ties_end); }
};

// -- teams: the threads that select from one chunk, a warp or the block ----------------------------------------------

template <u32 TEAM>
DEVICE void team_sync() {
    if constexpr (TEAM == WARP) __syncwarp();
    else __syncthreads();
}

template <u32 TEAM>
DEVICE u64 team_scan(u64 v, u64* total) {
    if constexpr (TEAM == WARP) {
        const u64 inclusive = warp_scan(v);
        *total = __shfl_sync(ALL_LANES, inclusive, WARP - 1);
        return inclusive - v;
    } else {
        return block_scan<TEAM>(v, total);
    }
}

// Returns the entries to select. All threads of a team call it; what they wrote before is seen by `key_at`.
//
//   size    [in]   elements of the chunk
//   k       [in]   entries to select
//   key_at  [in]   key_at(i) is the key of element i
//   counts  [out]  scratch: TEAM * BINS_EACH counters
//   found   [out]  scratch
template <u32 TEAM, class Size, class Count, class KeyAt>
DEVICE Winners select(Size size, u64 k, KeyAt key_at, Count* counts, Found* found) {
    constexpr u32 TEAM_BINS = TEAM * BINS_EACH, DIGIT = log2_of(TEAM_BINS);
    static_assert(TEAM_BINS == 1u << DIGIT, "a power of two");
    const u32 thread = threadIdx.x % TEAM, top = TEAM_BINS - 1 - thread * BINS_EACH;  // its bins: top, top - 1, ...
    Key kth = 0;   // as far as it is known
    u64 rank = k;  // of the k-th key among those that begin like it, from 1
    for (u32 open = KEY_BITS; open > 0;) {  // bits that are not known yet
        const u32 digit = open < DIGIT ? open : DIGIT, shift = open - digit;
        for (u32 b = thread; b < TEAM_BINS; b += TEAM) counts[b] = 0;
        team_sync<TEAM>();
        for (Size i = thread; i < size; i += TEAM) {
            const Key key = key_at(i);
            if (key && (key >> open) == (kth >> open)) atomicAdd(&counts[(key >> shift) & ((1u << digit) - 1)], Count(1));
        }
        team_sync<TEAM>();
        u64 mine = 0, all;
        for (u32 i = 0; i < BINS_EACH; i++) mine += counts[top - i];
        u64 above = team_scan<TEAM>(mine, &all);
        if (open == KEY_BITS && all <= k) return {0, 0, all};
        if (above < rank && rank <= above + mine) {
            u32 bin = top;
            while (above + counts[bin] < rank) above += counts[bin--];
            found->bin = bin;
            found->rank = rank - above;
            found->count = counts[bin];
        }
        team_sync<TEAM>();
        kth |= Key(found->bin) << shift;
        rank = found->rank;
        if (rank == found->count) return {kth - 1, 0, k};  // the whole bin wins; it is not that of zero, or all would
        open = shift;
    }
    u64 seen = 0;
    for (Size row = 0; row < size && seen < rank; row += TEAM) {  // in order: the first ties win
        const Size i = row + thread;
        const bool equal = i < size && key_at(i) == kth;
        u64 all;
        const u64 before = team_scan<TEAM>(equal, &all);
        if (equal && seen + before + 1 == rank) found->ties_end = i + 1;
        seen += all;
    }
    team_sync<TEAM>();
    return {kth, found->ties_end, k};
}

// Selects from all chunks of a tile, which the teams take in turn, and marks what wins. All threads call it.
//
//   tile   [in,out]  in: bits, zeros behind the last one. Out: wins
//   size   [in]      elements in the tile
//   chunk  [in]      elements of a chunk
// Returns entries; their sum over the threads is that of the tile.
template <u32 TEAM>
DEVICE u64 select_from_tile(Tile& tile, u32 size, u32 chunk, u64 k) {
    const u32 team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    u64 won = 0;
    for (u32 begin = team * chunk; begin < size; begin += BY_CHUNK_THREADS / TEAM * chunk) {
        const auto key_at = [&](u32 i) { return Key(key_of(tile.bits[begin + i])); };
        const Winners winners = select<TEAM>(chunk, k, key_at, tile.counts + team * TEAM * BINS_EACH, &tile.found[team]);
        for (u32 i = thread; i < chunk; i += TEAM) tile.wins[begin + i] = winners.has(key_at(i), i);
        won += winners.count;
    }
    return thread == 0 ? won : 0;
}

}  // namespace

//   x                [in]      n elements
//   residual         [in,out]  r = decay r + x, and 0 at the entries. Not used unless RESIDUAL
//   n, k, chunk      [in]      elements; entries to select from a chunk; elements of a chunk; all at least 1
//   chunks_per_tile  [in]      chunks of a tile: TILE / chunk, at least 1
//   decay            [in]      what the residual is multiplied by
//   aligned          [in]      whether x and residual are at a multiple of 16 bytes
//   indices, values  [out]     the entries, in order of index; room for min(k, its elements) of every chunk
//   count            [out]     entries
//   look_back        [in,out]  see lookback.cuh
KERNEL void __launch_bounds__(BY_CHUNK_THREADS, 4)
chunks(const XBits* x, AccBits* residual, u64 n, u64 k, u64 chunk, u64 chunks_per_tile, Acc::Accumulator decay, bool aligned,
       Index* indices, Acc::Accumulator* values, u64* count, LookBack* look_back) {
    SHARED(Tile, tile);
    const u32 ticket = tile_ticket(look_back);
    const u64 tile_size = chunks_per_tile * chunk, begin = ticket * tile_size;
    const u64 end = n - begin < tile_size ? n : begin + tile_size, thread = u64(threadIdx.x) * VECTOR;
    const bool fits = chunk <= TILE, vectors = aligned && begin % VECTOR == 0;
#if RESIDUAL
    const AccBits* data = residual;
#else
    const AccBits* data = x;
#endif
    Winners winners{};  // of the chunk that is longer than a tile
    u64 won, all;
    if (fits) {
        Group<AccBits> loaded[TILE / ROW];
        UNROLL
        for (u32 r = 0; r < TILE / ROW; r++)
            loaded[r] = accumulated(x, residual, begin + r * ROW + thread, end, vectors, decay);
        UNROLL
        for (u32 r = 0; r < TILE / ROW; r++) store_group(tile.bits, r * ROW + thread, TILE, true, loaded[r]);
        __syncthreads();
        if (chunk <= TILE / WARPS) won = select_from_tile<WARP>(tile, u32(end - begin), u32(chunk), k);
        else won = select_from_tile<BY_CHUNK_THREADS>(tile, u32(end - begin), u32(chunk), k);
    } else {
#if RESIDUAL
        for (u64 i = begin + thread; i < end; i += ROW)
            store_group(residual, i, end, vectors, accumulated(x, residual, i, end, vectors, decay));
#endif
        const auto key_at = [&](u64 i) { return Key(key_of(data[begin + i])); };
        winners = select<BY_CHUNK_THREADS>(end - begin, k, key_at, tile.counts_of_many, &tile.found[0]);
        won = threadIdx.x == 0 ? winners.count : 0;
    }
    block_scan<BY_CHUNK_THREADS>(won, &all);
    u64 to = exclusive_prefix(look_back, ticket, all);
    if (threadIdx.x == 0 && ticket == gridDim.x - 1) *count = to + all;
    for (u64 row = begin; row < end; row += ROW) {  // in order
        const u64 i = row + thread;
        Group<AccBits> g = fits ? load_group(tile.bits, i - begin, TILE, true) : load_group(data, i, end, vectors);
        u32 taken = 0;  // bit e: element e is an entry
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            if (i + e >= end) break;
            taken |= u32(fits ? tile.wins[i - begin + e] : winners.has(key_of(g.get(e)), i - begin + e)) << e;
        }
        u64 own = to + block_scan<BY_CHUNK_THREADS>(u64(__popc(taken)), &all);
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            if (!(taken >> e & 1)) continue;
            indices[own] = Index(i + e);
            values[own++] = value_of(g.get(e));
            g.set(e, 0);
        }
#if RESIDUAL
        if (fits || taken) store_group(residual, i, end, vectors, g);
#endif
        to += all;
    }
    reset_after_last_block(look_back, gridDim.x);
}
