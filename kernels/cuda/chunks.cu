// The exact top-k by |v| of every chunk of a vector, in one pass, for any chunks and k. warp_chunks.cu is faster where it can
// be used.
//
// Chunks begin at elements 0, chunk, 2 chunk, ...; the last one may be shorter. The order within a chunk is (|v| descending,
// index ascending), with NaN above infinity. Zeros are never selected: a chunk with fewer than k nonzero elements contributes
// all of them. Entries are written in order of index.
//
// Grid: any number of blocks, each of which takes one tile after another. A tile has BY_CHUNK_THREADS * BY_CHUNK_ITEMS
// elements of shared memory and contains as many whole chunks as fit. The team that selects from a chunk is a warp if there
// are at least as many chunks as warps, else the block, which works in registers if a tile is a single chunk. A chunk that
// does not fit is a tile of its own. It is read from the residual (or x) for each digit of the keys, mostly from the L2,
// which is slower but works for any length.
//
// Reads x and the residual once and writes the residual once (f32: 4n bytes, with a residual 12n), and writes the entries.
// A team finds the k-th key by radix selection from the highest digit, in a histogram of 8 bins per thread. When at most as
// many keys as threads share the digits of the k-th key, usually after the first pass, each thread ranks one of them.
// Deterministic: atomics only count, in shared memory. Decoupled look-back finds the position of a tile's entries in the
// output. If there is room, the entries wait in shared memory while the block selects from its next tile; by then, their
// position is usually known.
#include "load.cuh"
#include "lookback.cuh"

using namespace sparsecomm;

namespace {

using Key = decltype(AccBits() + 0u);  // 32 bits or 64

constexpr u32 TILE = BY_CHUNK_THREADS * BY_CHUNK_ITEMS;  // elements
constexpr u32 ROW = BY_CHUNK_THREADS * VECTOR;        // elements that the block loads at once
constexpr u32 WARPS = BY_CHUNK_THREADS / WARP;
constexpr u32 ROWS = TILE / ROW;
constexpr u32 WORDS = (ROWS + 3) / 4;  // words for the entry counts of all rows, 16 bits per row
constexpr u32 ROOM = TILE / 32;  // entries of a tile that can wait for their position
constexpr bool IN_REGISTERS = sizeof(AccBits) < 8;  // a tile of 64-bit elements would need too many registers
constexpr u32 BINS_EACH = 8;  // per thread
constexpr u32 BINS_OF_BLOCK = BY_CHUNK_THREADS * BINS_EACH;
constexpr u32 KEY_BITS = sizeof(AccBits) * 8 - 1;
static_assert(TILE % ROW == 0, "whole rows");

DEVICE constexpr u32 log2_of(u32 power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// Results that a team shares among its threads.
struct Found {
    u32 bin, gathered;
    u64 rank, count;  // of the k-th key within the bin; of keys in the bin
    Key kth;
    u64 ties_end;
};

// In shared memory.
struct Tile {
    union {
        alignas(16) AccBits bits[TILE];     // of all elements
        u64 counts_of_many[BINS_OF_BLOCK];  // of a chunk that does not fit into a tile
    };
    alignas(16) u32 counts[BINS_OF_BLOCK];  // of keys in the bins of each team
    Found found[WARPS];                     // of each team
    unsigned char wins[TILE];
    u32 at[2][ROOM];  // positions, within their tile, of the entries that wait, for two tiles in turn
    AccBits waiting[2][ROOM];
    u32 waiting_tile[2], waiting_count[2];
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

// The keys that share the known digits of the k-th key, and their positions: at most one per thread of a team. Uses the
// counters' memory.
template <u32 TEAM, class Size, class Count>
struct Few {
    Key* key;
    Size* at;

    DEVICE explicit Few(Count* counts) : key(reinterpret_cast<Key*>(counts)), at(reinterpret_cast<Size*>(key + TEAM)) {
        static_assert(sizeof(Key) + sizeof(Size) <= BINS_EACH * sizeof(Count), "room for them");
    }

    DEVICE void add(Found* found, Key its_key, Size i) const {
        const u32 to = atomicAdd(&found->gathered, 1u);
        key[to] = its_key;
        at[to] = i;
    }

    // Ranks the keys. All threads of the team call it.
    DEVICE Winners winners(Found* found, u64 k) const {
        team_sync<TEAM>();
        const u32 thread = threadIdx.x % TEAM, count = found->gathered;
        if (thread < count) {
            const Key own = key[thread];
            const Size i = at[thread];
            u32 before = 0;
            for (u32 other = 0; other < count; other++) before += key[other] > own || (key[other] == own && at[other] < i);
            if (before + 1 == found->rank) {
                found->kth = own;
                found->ties_end = i + 1;
            }
        }
        team_sync<TEAM>();
        return {found->kth, found->ties_end, k};
    }
};

// Returns the entries to select. All threads of a team call it; `key_at` sees their earlier writes.
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
    Key kth = 0;   // its known digits
    u64 rank = k;  // of the k-th key among the keys with these digits, from 1
    for (u32 open = KEY_BITS; open > 0;) {  // number of unknown bits
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
            found->gathered = 0;
        }
        team_sync<TEAM>();
        kth |= Key(found->bin) << shift;
        rank = found->rank;
        const u64 count = found->count;
        if (rank == count) return {kth - 1, 0, k};  // the whole bin wins, and does not contain key 0
        if (count <= TEAM) {
            const Few<TEAM, Size, Count> few(counts);
            for (Size i = thread; i < size; i += TEAM) {
                const Key key = key_at(i);
                if (key && (key >> shift) == (kth >> shift)) few.add(found, key, i);
            }
            return few.winners(found, k);
        }
        open = shift;
    }
    u64 seen = 0;  // number of keys equal to the k-th, all of whose bits are now known
    for (Size row = 0; row < size && seen < rank; row += TEAM) {  // in order, because the first ties win
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

// The first pass of `select` for a chunk that is a whole tile, with the elements in registers. Returns false if more passes
// are needed. Otherwise sets bit e of taken[r] if element e of this thread's row r is an entry. All threads call it.
DEVICE bool select_in_registers(const Group<AccBits> (&group)[ROWS], u64 k, Tile& tile, u32 (&taken)[ROWS]) {
    constexpr u32 SHIFT = KEY_BITS - log2_of(BINS_OF_BLOCK);
    static_assert(KEY_BITS > log2_of(BINS_OF_BLOCK), "the pass leaves some bits");
    Found* found = &tile.found[0];
    u32* counts = tile.counts;
    const auto each = [&](auto look) {
        UNROLL
        for (u32 r = 0; r < ROWS; r++) {
            UNROLL
            for (u32 e = 0; e < VECTOR; e++) look(Key(key_of(group[r].get(e))), r, e);
        }
    };
    const u32 top = BINS_OF_BLOCK - 1 - threadIdx.x * BINS_EACH;
    for (u32 b = threadIdx.x; b < BINS_OF_BLOCK; b += BY_CHUNK_THREADS) counts[b] = 0;
    __syncthreads();
    each([&](Key key, u32, u32) {
        if (key) atomicAdd(&counts[key >> SHIFT], 1u);
    });
    __syncthreads();
    u32 here[BINS_EACH], mine = 0, all;
    UNROLL
    for (u32 i = 0; i < BINS_EACH; i++) {
        here[i] = counts[top - i];
        mine += here[i];
    }
    u32 above = block_scan<BY_CHUNK_THREADS>(mine, &all);
    Winners winners{0, 0, all};
    if (all > k) {
        if (above < k && k <= above + mine) {
            UNROLL
            for (u32 i = 0; i < BINS_EACH; i++) {
                if (above < k && k <= above + here[i]) {
                    found->bin = top - i;
                    found->rank = k - above;
                    found->count = here[i];
                    found->gathered = 0;
                }
                above += here[i];
            }
        }
        __syncthreads();
        const Key bin = found->bin;
        const u64 count = found->count;
        if (found->rank == count) {
            winners = {Key((bin << SHIFT) - 1), 0, k};
        } else if (count <= BY_CHUNK_THREADS) {
            const Few<BY_CHUNK_THREADS, u32, u32> few(counts);
            each([&](Key key, u32 r, u32 e) {
                if (key && key >> SHIFT == bin) few.add(found, key, r * ROW + threadIdx.x * VECTOR + e);
            });
            winners = few.winners(found, k);
        } else {
            return false;
        }
    }
    UNROLL
    for (u32 r = 0; r < ROWS; r++) taken[r] = 0;
    const u32 ties_end = u32(winners.ties_end);
    each([&](Key key, u32 r, u32 e) {
        const bool wins = key > winners.kth || (key == winners.kth && r * ROW + threadIdx.x * VECTOR + e < ties_end);
        taken[r] |= u32(wins) << e;
    });
    return true;
}

// Selects from all chunks of a tile, distributed over the teams, and marks the winners. All threads call it.
//
//   tile   [in,out]  in: bits, followed by zeros. Out: wins
//   size   [in]      elements in the tile
//   chunk  [in]      elements of a chunk
template <u32 TEAM>
DEVICE void select_from_tile(Tile& tile, u32 size, u32 chunk, u64 k) {
    const u32 team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    for (u32 begin = team * chunk; begin < size; begin += BY_CHUNK_THREADS / TEAM * chunk) {
        const auto key_at = [&](u32 i) { return Key(key_of(tile.bits[begin + i])); };
        const Winners winners = select<TEAM>(chunk, k, key_at, tile.counts + team * TEAM * BINS_EACH, &tile.found[team]);
        for (u32 i = thread; i < chunk; i += TEAM) tile.wins[begin + i] = winners.has(key_at(i), i);
    }
}

// Selects from chunks in shared memory, for any data and any number of chunks in the tile. Sets `taken` as
// `select_in_registers`. All threads call it.
DEVICE void select_in_shared_memory(const Group<AccBits> (&group)[ROWS], u32 size, u32 chunk, u64 k, Tile& tile,
                                    u32 (&taken)[ROWS]) {
    UNROLL
    for (u32 r = 0; r < ROWS; r++) store_group(tile.bits, r * ROW + threadIdx.x * VECTOR, TILE, true, group[r]);
    __syncthreads();
    if (chunk <= TILE / WARPS) select_from_tile<WARP>(tile, size, chunk, k);
    else select_from_tile<BY_CHUNK_THREADS>(tile, size, chunk, k);
    __syncthreads();
    UNROLL
    for (u32 r = 0; r < ROWS; r++) {
        const u32 first = r * ROW + threadIdx.x * VECTOR;
        taken[r] = 0;
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) taken[r] |= u32(first + e < size && tile.wins[first + e]) << e;
    }
}

// Selects from a chunk [begin, end) that does not fit into shared memory, and writes its entries. All threads call it.
DEVICE void select_from_long_chunk(const XBits* x, AccBits* residual, u64 begin, u64 end, u64 k, Acc::Accumulator decay,
                                   bool vectors, Tile& tile, Index* indices, Acc::Accumulator* values, u64* count,
                                   LookBack* look_back, u32 ticket, u32 tiles) {
    const u64 thread = u64(threadIdx.x) * VECTOR;
#if RESIDUAL
    const AccBits* data = residual;
    for (u64 i = begin + thread; i < end; i += ROW)
        store_group(residual, i, end, vectors, accumulated(x, residual, i, end, vectors, decay));
#else
    const AccBits* data = x;
#endif
    const auto key_at = [&](u64 i) { return Key(key_of(data[begin + i])); };
    const Winners winners = select<BY_CHUNK_THREADS>(end - begin, k, key_at, tile.counts_of_many, &tile.found[0]);
    u64 to = exclusive_prefix(look_back, ticket, winners.count), all;
    if (threadIdx.x == 0 && ticket == tiles - 1) *count = to + winners.count;
    for (u64 row = begin; row < end; row += ROW) {  // in order
        const u64 i = row + thread;
        Group<AccBits> g = load_group(data, i, end, vectors);
        u32 taken = 0;
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) taken |= u32(i + e < end && winners.has(key_of(g.get(e)), i - begin + e)) << e;
        u64 own = to + block_scan<BY_CHUNK_THREADS>(u64(__popc(taken)), &all);
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            if (!(taken >> e & 1)) continue;
            indices[own] = Index(i + e);
            values[own++] = value_of(g.get(e));
            g.set(e, 0);
        }
#if RESIDUAL
        if (taken) store_group(residual, i, end, vectors, g);
#endif
        to += all;
    }
}

}  // namespace

//   x                [in]      n elements
//   residual         [in,out]  r = decay r + x, with 0 at the entries. Not used unless RESIDUAL
//   n, k, chunk      [in]      elements; entries to select per chunk; elements of a chunk; all at least 1
//   chunks_per_tile  [in]      TILE / chunk, at least 1
//   decay            [in]      factor of the residual
//   aligned          [in]      whether the addresses of x and residual are multiples of 16
//   indices, values  [out]     entries in order of index; room for min(k, elements) of every chunk
//   count            [out]     number of entries
//   look_back        [in,out]  see lookback.cuh
KERNEL void __launch_bounds__(BY_CHUNK_THREADS, BY_CHUNK_BLOCKS)
chunks(const XBits* x, AccBits* residual, u64 n, u64 k, u64 chunk, u64 chunks_per_tile, Acc::Accumulator decay, bool aligned,
       Index* indices, Acc::Accumulator* values, u64* count, LookBack* look_back) {
    SHARED(Tile, tile);
    const u64 tile_size = chunks_per_tile * chunk;
    const u32 tiles = u32((n + tile_size - 1) / tile_size), thread = threadIdx.x * VECTOR;
    u32 turn = 0;
    if (threadIdx.x < 2) tile.waiting_tile[threadIdx.x] = tiles;  // no tile
    while (true) {
        const u32 ticket = tile_ticket(look_back);
        const u64 begin = ticket * tile_size, end = n - begin < tile_size ? n : begin + tile_size;
        const bool vectors = aligned && begin % VECTOR == 0;
        turn ^= 1;
        if (ticket < tiles && chunk > TILE) {
            select_from_long_chunk(x, residual, begin, end, k, decay, vectors, tile, indices, values, count, look_back,
                                   ticket, tiles);
        } else if (ticket < tiles) {
            Group<AccBits> group[ROWS];
            u32 taken[ROWS];  // bit e: element e of a row is an entry
            accumulate<ROWS, ROW>(group, x, residual, begin + thread, end, vectors, vectors && begin + TILE <= end, decay);
            if (!IN_REGISTERS || chunks_per_tile > 1 || !select_in_registers(group, k, tile, taken))
                select_in_shared_memory(group, u32(end - begin), u32(chunk), k, tile, taken);
            const auto row = [&](u32 r) {
                return IN_REGISTERS ? group[r] : load_group(tile.bits, r * ROW + thread, TILE, true);
            };
            u64 before[WORDS] = {}, total[WORDS];  // entry counts of four rows per word
            UNROLL
            for (u32 r = 0; r < ROWS; r++) before[r / 4] += u64(__popc(taken[r])) << (r % 4 * 16);
            u32 all = 0;
            UNROLL
            for (u32 w = 0; w < WORDS; w++) {
                before[w] = block_scan<BY_CHUNK_THREADS>(before[w], &total[w]);
                all += u32(total[w] & 0xffff) + u32(total[w] >> 16 & 0xffff) + u32(total[w] >> 32 & 0xffff) +
                       u32(total[w] >> 48);
            }
            const bool waits = all <= ROOM;
            if (threadIdx.x == 0) {
                publish(look_back, ticket, all);
                tile.waiting_tile[turn] = waits ? ticket : tiles;
                tile.waiting_count[turn] = all;
            }
            u64 to = 0;
            if (!waits) {
                to = prefix_before(look_back, ticket, all);
                if (threadIdx.x == 0 && ticket == tiles - 1) *count = to + all;
            }
            u32 rows_before = 0;
            UNROLL
            for (u32 r = 0; r < ROWS; r++) {
                Group<AccBits> rest = row(r);
                u32 mine = rows_before + u32(before[r / 4] >> (r % 4 * 16) & 0xffff);
                UNROLL
                for (u32 e = 0; e < VECTOR; e++) {
                    if (!(taken[r] >> e & 1)) continue;
                    if (waits) {
                        tile.at[turn][mine] = r * ROW + thread + e;
                        tile.waiting[turn][mine] = rest.get(e);
                    } else {
                        indices[to + mine] = Index(begin + r * ROW + thread + e);
                        values[to + mine] = value_of(rest.get(e));
                    }
                    rest.set(e, 0);
                    mine++;
                }
#if RESIDUAL
                store_group(residual, begin + r * ROW + thread, end, vectors, rest);
#endif
                rows_before += u32(total[r / 4] >> (r % 4 * 16) & 0xffff);
            }
        }
        const u32 last = tile.waiting_tile[turn ^ 1], waiting = tile.waiting_count[turn ^ 1];
        if (last < tiles) {
            const u64 to = prefix_before(look_back, last, waiting);
            for (u32 w = threadIdx.x; w < waiting; w += BY_CHUNK_THREADS) {
                indices[to + w] = Index(last * tile_size + tile.at[turn ^ 1][w]);
                values[to + w] = value_of(tile.waiting[turn ^ 1][w]);
            }
            if (threadIdx.x == 0 && last == tiles - 1) *count = to + waiting;
        }
        if (ticket >= tiles) break;
    }
    reset_after_last_block(look_back, tiles);
}
