// The exact top-k by |v| of every chunk of a vector, in one pass, by warps: for chunks and k of medium size (chunks.cu has no
// limits). Order, ties, NaN, zeros and short chunks: see chunks.cu.
//
// Grid: any number of blocks, each of which takes one tile after another. In a tile, each warp selects from a few adjacent
// chunks, without waiting for other warps. It reads a chunk in rounds. The first round is also a sample: it yields a
// threshold that a few more than k elements of the chunk are expected to reach. Those that do are candidates, and wait in
// shared memory. If there is no room for more, the k best stay and the threshold rises above the last of them. At the end,
// the k best are the entries. With fewer than k candidates, the sample was misleading, or the chunk has fewer nonzero
// elements: the warp reads the chunk once more, mostly from the L2, and every nonzero is a candidate. So the sample affects
// the time and never the result.
//
// Reads x and the residual once and writes the residual once (f32: 4n bytes, with a residual 12n), and writes the entries.
// No atomics but tickets. Deterministic.
#include "compact.cuh"

using namespace sparsecomm;

namespace {

using Key = decltype(AccBits() + 0u);  // 32 bits or 64

constexpr u32 WARPS = BY_WARP_THREADS / WARP;
constexpr u32 ROWS = sizeof(XBits) == 4 ? 4 : 2;  // loaded at once
constexpr u32 ROUND = ROWS * ROW;
constexpr u32 ROOM = BY_WARP_MAX_K + ROUND;     // candidates of a warp: a round fits beside the k best
constexpr u32 QUAD = VECTOR < 4 ? VECTOR : 4;  // adjacent elements (of 8 bytes: two), of which the sample uses the largest
constexpr u32 QUADS = ROWS * VECTOR / QUAD;    // of each lane
// Blocks per multiprocessor, limited by registers per thread. 16-bit floats with a float32 residual need the most.
constexpr u32 FEWER = sizeof(AccBits) > sizeof(XBits) ? 2 : RESIDUAL || sizeof(XBits) == 2 ? 1 : 0;
constexpr u32 BLOCKS = BY_WARP_BLOCKS - FEWER;

// In shared memory, one per warp.
template <u32 SIZE>
struct Entries {
    AccBits key[SIZE];
    u16 at[SIZE];  // positions, from the first element of the warp's part of the tile; the highest bit is the sign
};
constexpr u32 POSITION = 0x7fff, SIGN_BIT = sizeof(AccBits) * 8 - 1;

// Which of several keys win: those above `kth`, and the first `ties` of those equal to it.
struct Winners {
    Key kth;
    u32 ties;
};

// Finds a key that exactly `wanted` of some keys reach, or else the `wanted`-th of them. All lanes call it.
//
//   low       [in]  more than `wanted` keys reach it
//   high      [in]  above all keys
//   spare     [in]  also accepts a key that up to `wanted` + spare keys reach
//   count_of  [in]  count_of(key) is the number of keys that reach `key`; all lanes call it
template <class CountOf>
DEVICE Winners search(Key low, Key high, u32 wanted, u32 spare, CountOf count_of) {
    u32 above = 0;  // number of keys that reach `high`
    while (high - low > 1) {
        const Key middle = low + (high - low) / 2;
        const u32 count = count_of(middle);
        if (count < wanted) {
            high = middle;
            above = count;
        } else {
            low = middle;
            if (count <= wanted + spare) return {Key(low - 1), 0};
        }
    }
    return {low, wanted - above};
}

DEVICE Key warp_min(Key v) { return ~warp_max(Key(~v)); }

// Returns a threshold that about `wanted` of a warp's QUADS * WARP quads of a round reach. All lanes call it.
DEVICE Key threshold_of(const Group<AccBits> (&group)[ROWS], u32 wanted) {
    Key largest[QUADS], low = ~Key(0), high = 0;
    UNROLL
    for (u32 s = 0; s < QUADS; s++) {
        largest[s] = 0;
        UNROLL
        for (u32 i = 0; i < QUAD; i++) {
            const u32 e = s * QUAD + i;
            const Key v = magnitude(group[e / VECTOR].get(e % VECTOR));
            largest[s] = v > largest[s] ? v : largest[s];
        }
        largest[s] = largest[s] <= Acc::infinity ? largest[s] : Key(Acc::infinity) + 1;
        low = largest[s] < low ? largest[s] : low;
        high = largest[s] > high ? largest[s] : high;
    }
    const Winners found = search(warp_min(low), warp_max(high) + 1, wanted, wanted / 8, [&](Key key) {
        u32 count = 0;
        UNROLL
        for (u32 s = 0; s < QUADS; s++) count += u32(__popc(__ballot_sync(ALL_LANES, largest[s] >= key)));
        return count;
    });
    const Key threshold = found.ties ? found.kth : found.kth + 1;
    return threshold ? threshold : 1;
}

// Moves the first k of `count` candidates, more than k, to `to`, in order. Returns the smallest magnitude of a later element
// that can be among them. All lanes call it.
//
//   from  [in]   candidates; has room for `count` rounded up to a multiple of STRIDE
//   to    [out]  room for k entries; may be `from`
DEVICE Key keep_best(AccBits* from, const u16* from_at, u32 count, u32 k, AccBits* to, u16* to_at) {
    constexpr u32 EACH = 4, STRIDE = EACH * WARP;  // keys that a lane reads at once, and a warp
    static_assert(ROOM % STRIDE == 0, "room for all reads");
    const u32 lane = threadIdx.x % WARP, end = (count + STRIDE - 1) / STRIDE * STRIDE;
    for (u32 i = count + lane; i < end; i += WARP) from[i] = 0;
    __syncwarp();  // shows all lanes the candidates
    Key low = ~Key(0), high = 0;
    for (u32 i = lane; i < count; i += WARP) {
        const Key key = from[i];
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    const Winners winners = search(warp_min(low), warp_max(high) + 1, k, 0, [&](Key key) {
        u32 reach = 0;
        for (u32 i = lane; i < end; i += STRIDE) {
            UNROLL
            for (u32 j = 0; j < EACH; j++) reach += from[i + j * WARP] >= key;
        }
        return warp_sum(reach);
    });
    const u32 lower_lanes = (1u << lane) - 1;
    u32 kept = 0, tied = 0;
    for (u32 i = lane; i < end && kept < k; i += WARP) {
        const Key key = from[i];
        const u16 at = from_at[i];
        const u32 equal = __ballot_sync(ALL_LANES, key == winners.kth);
        const bool wins = key > winners.kth || (key == winners.kth && tied + __popc(equal & lower_lanes) < winners.ties);
        const u32 won = __ballot_sync(ALL_LANES, wins), place = kept + u32(__popc(won & lower_lanes));
        __syncwarp();  // all lanes have read what this overwrites
        if (wins) {
            to[place] = AccBits(key);
            to_at[place] = at;
        }
        kept += u32(__popc(won));
        tied += u32(__popc(equal));
    }
    __syncwarp();
    return above(AccBits(winners.kth), Acc::infinity);
}

// Selects from a chunk. Returns the number of its entries, at most k. All lanes of a warp call it.
//
//   x, residual  [in,out]  elements of the chunk; as in `chunks`, but without 0 at the entries
//   size         [in]      number of elements
//   vectors      [in]      whether the addresses of x and residual are multiples of 16
//   wanted       [in]      quads of the first round that should reach the threshold; 0: no sample
//   first        [in]      position of the first element
//   found        [out]     scratch
//   key, at      [out]     entries in order of index
DEVICE u32 select(const XBits* x, AccBits* residual, u32 size, u32 k, Acc::Accumulator decay, bool vectors, u32 wanted,
                  u32 first, Entries<ROOM>& found, AccBits* key, u16* at) {
    const u32 lane = threadIdx.x % WARP;
    Key threshold = wanted ? 0 : 1;
    u32 count;
    while (true) {
        count = 0;
        for (u32 round = 0; round < size; round += ROUND) {
            const u32 mine = round + lane * VECTOR;
            const bool whole = vectors && round + ROUND <= size;
            Group<AccBits> group[ROWS];
            accumulate<ROWS, ROW>(group, x, residual, mine, size, vectors, whole, decay);
#if RESIDUAL
            if (x != nullptr) {
                UNROLL
                for (u32 r = 0; r < ROWS; r++) store_group(residual, mine + r * ROW, whole ? ~0ull : size, vectors, group[r]);
            }
#endif
            if (threshold == 0) threshold = threshold_of(group, wanted);
            while (true) {
                const RowEntries<ROWS> entries(group, AccBits(threshold));
                if (count + entries.count() <= ROOM) {
                    entries.store<false>(found.key, found.at, count, [&](AccBits* key, u16* at, u32 r, u32 e) {
                        const AccBits bits = group[r].get(e);
                        *key = key_of(bits);
                        *at = u16((first + mine + r * ROW + e) | u32(bits >> SIGN_BIT) << 15);
                    });
                    count += entries.count();
                    break;
                }
                threshold = keep_best(found.key, found.at, count, k, found.key, found.at);
                count = k;
            }
        }
        if (count >= k || threshold <= 1) break;
        threshold = 1;
#if RESIDUAL
        x = nullptr;  // the residual contains the sums
#endif
    }
    if (count > k) {
        keep_best(found.key, found.at, count, k, key, at);
        return k;
    }
    __syncwarp();  // shows all lanes the candidates
    for (u32 i = lane; i < count; i += WARP) {
        key[i] = found.key[i];
        at[i] = found.at[i];
    }
    __syncwarp();  // all lanes have read them, and the next chunk's may replace them
    return count;
}

}  // namespace

// Arguments as of `chunks`, but:
//
//   k                [in]  at most BY_WARP_MAX_K
//   chunks_per_warp  [in]  chunks that a warp takes at a time; at most BY_WARP_MAX_K / k, and with at most 32,768 elements
//   wanted           [in]  quads of the first round of a whole chunk that should reach the threshold; 0: no sample
KERNEL void __launch_bounds__(BY_WARP_THREADS, BLOCKS)
warp_chunks(const XBits* x, AccBits* residual, u64 n, u64 k, u64 chunk, u64 chunks_per_warp, u64 wanted,
            Acc::Accumulator decay, bool aligned, Index* indices, Acc::Accumulator* values, u64* count, LookBack* look_back) {
    struct All {
        Entries<ROOM> found[WARPS];
        Entries<BY_WARP_MAX_K> waiting[2][WARPS];
    };
    SHARED(All, all);
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u64 part = chunks_per_warp * chunk;
    const u32 tiles = u32((n + WARPS * part - 1) / (WARPS * part));
    const auto read = [&](u32 tile, u32 turn) {
        Entries<BY_WARP_MAX_K>& waiting = all.waiting[turn][warp];
        const u64 first = (u64(tile) * WARPS + warp) * part;
        u32 selected = 0;
        for (u64 begin = first; begin < n && begin < first + part; begin += chunk) {
            const bool whole = begin + chunk <= n;
            selected += select(x + begin, residual + begin, u32(whole ? chunk : n - begin), u32(k), decay,
                               aligned && begin % VECTOR == 0, whole ? u32(wanted) : 0u, u32(begin - first),
                               all.found[warp], waiting.key + selected, waiting.at + selected);
        }
#if RESIDUAL
        for (u32 i = lane; i < selected; i += WARP) residual[first + (waiting.at[i] & POSITION)] = 0;
#endif
        return selected;
    };
    const auto write = [&](u32 tile, u32 turn, u32 selected, u64 position) {
        const Entries<BY_WARP_MAX_K>& waiting = all.waiting[turn][warp];
        const u64 first = (u64(tile) * WARPS + warp) * part;
        for (u32 i = lane; i < selected; i += WARP) {
            const u32 at = waiting.at[i];
            indices[position + i] = Index(first + (at & POSITION));
            values[position + i] = value_of(AccBits(waiting.key[i] | AccBits(AccBits(at >> 15) << SIGN_BIT)));
        }
    };
    const u64 total = compact_tiles<BY_WARP_THREADS>(look_back, tiles, read, write);
    if (threadIdx.x == 0 && total != NOT_LAST_TILE) *count = total;
    reset_after_last_block(look_back, tiles);
}
