// The exact top-k by |v|, in one pass over the data and a few over the candidates. Four launches.
//
//   sample   finds a likely lower bound of the k-th key                  reads up to 1 MB
//   filter   r = r + x; takes the candidates: keys that reach the bound  reads 4n (f32), with a residual 8n, and writes 4n
//   emit     finds the k-th key, and writes the winners;                 reads the candidates twice, writes 8k
//            losers return to the residual (emit.cuh)
//   radix    selects again if the sample was wrong (radix.cu)            usually reads one flag
//
// Grids: at most SAMPLE_SECTORS / SAMPLE_THREADS blocks for sample; for others at most as many as run at once.
// The order is (|v| descending, index ascending), with NaN above infinity, so the first ties win. Zeros are never selected:
// if fewer than k elements are nonzero, all of them are. k > n selects as k = n. Deterministic: the positions of the sample
// are fixed, and the sample affects only the time. Atomics only count.
#include "emit.cuh"
#include "filter.cuh"

using namespace sparsecomm;

namespace {

// In device memory; zeros between calls.
struct Sample {
    u32 blocks_done;
    OWN_LINE u32 histogram[SAMPLE_BINS];  // of all blocks
};
static_assert(sizeof(Sample) == SAMPLE_BYTES, "as in sparsecomm/backends/cuda/modules.py");

constexpr u32 SECTOR = 32 / sizeof(XBits);  // elements that the sample reads at once
// The sample's bins begin at SAMPLE_BEGIN. They cover all keys; for float64, 2^-192 to 2^64, in 32 bins per octave.
constexpr u32 SAMPLE_SHIFT = sizeof(AccBits) == 8 ? 47 : KEY_BITS<AccBits> - 13;
constexpr u64 SAMPLE_BEGIN = sizeof(AccBits) == 8 ? 831ull << 52 : 0;
static_assert(SAMPLE_BINS == 1u << 13, "13 bits of keys");

// All bins together cover two octaves, because the k-th key is rarely farther above the threshold.
constexpr u32 BIN_SHIFT = sizeof(AccBits) == 8 ? 42 : sizeof(AccBits) == 4 ? 12 : 0;

DEVICE u64 scattered(u64 i) {  // splitmix64: Steele, Lea & Flood, 2014
    i += 0x9e3779b97f4a7c15ull;
    i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9ull;
    i = (i ^ (i >> 27)) * 0x94d049bb133111ebull;
    return i ^ (i >> 31);
}

}  // namespace

// Finds a threshold that a few more than k entries are expected to reach. Any number of blocks. Reads a pseudo-random sector
// of 32 bytes in each of `sectors` equal strata, one per thread at a time.
//
//   x, residual  [in]      n elements each; the residual is not used unless RESIDUAL
//   n            [in]      number of elements, at least SECTOR * sectors
//   aligned      [in]      whether the addresses of x and residual are multiples of 16
//   sectors      [in]      number of sectors
//   wanted       [in]      number of sampled elements that should reach the threshold; with fewer nonzero ones, all do
//   state        [in,out]  zeros
//   selection    [out]     threshold, shift
KERNEL void __launch_bounds__(SAMPLE_THREADS, 1)
sample(const XBits* x, const AccBits* residual, u64 n, bool aligned, u64 sectors, u64 wanted, Sample* state, Selection* selection) {
    struct Counts {
        u32 of[SAMPLE_BINS + SAMPLE_BINS / WARP];  // bin b is at b + b / WARP, to avoid bank conflicts in `find_rank`
    };
    SHARED(Counts, counts);
    const auto place = [](u32 b) { return b + b / WARP; };
    for (u32 b = threadIdx.x; b < SAMPLE_BINS; b += SAMPLE_THREADS) counts.of[place(b)] = 0;
    __syncthreads();
    const u64 step = n / sectors;  // at least SECTOR
    for (u64 i = u64(blockIdx.x) * SAMPLE_THREADS + threadIdx.x; i < sectors; i += u64(gridDim.x) * SAMPLE_THREADS) {
        const u64 position = i * step + scattered(i) % (step - SECTOR + 1), begin = position - position % SECTOR;
        Group<AccBits> group[SECTOR / VECTOR];
        accumulate<SECTOR / VECTOR, VECTOR>(group, x, residual, begin, n, aligned, aligned && begin + SECTOR <= n);
        UNROLL
        for (u32 c = 0; c < SECTOR / VECTOR; c++) {
            UNROLL
            for (u32 e = 0; e < VECTOR; e++) {
                const AccBits key = key_of(group[c].get(e));
                if (key) atomicAdd(&counts.of[place(bin_of<SAMPLE_BINS>(key, SAMPLE_BEGIN, SAMPLE_SHIFT))], 1u);
            }
        }
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < SAMPLE_BINS; b += SAMPLE_THREADS) {
        const u32 found = counts.of[place(b)];
        if (found) atomicAdd(&state->histogram[slot_of<SAMPLE_BINS>(b)], found);
    }
    if (!is_last_block(&state->blocks_done)) return;
    constexpr u32 EACH = SAMPLE_BINS / SAMPLE_THREADS;
    static_assert(SAMPLE_BINS % SAMPLE_THREADS == 0, "as many bins for each thread");
    u32 found[EACH];
    u64 mine = 0, all;
    UNROLL
    for (u32 i = 0; i < EACH; i++) found[i] = state->histogram[i * SAMPLE_THREADS + threadIdx.x];
    UNROLL
    for (u32 i = 0; i < EACH; i++) {
        const u32 slot = i * SAMPLE_THREADS + threadIdx.x;
        state->histogram[slot] = 0;
        counts.of[place(bin_at<SAMPLE_BINS>(slot))] = found[i];
        mine += found[i];
    }
    block_scan<SAMPLE_THREADS>(mine, &all);
    u32 bin = 0;
    u64 rank;
    const auto count_at = [&](u32 b) { return counts.of[place(b)]; };
    if (all >= wanted) find_rank<SAMPLE_THREADS, SAMPLE_BINS>(count_at, wanted, &bin, &rank);
    if (threadIdx.x == 0) {
        selection->threshold = bin ? SAMPLE_BEGIN + (u64(bin) << SAMPLE_SHIFT) : 1;
        selection->shift = BIN_SHIFT;
    }
}

// Writes the candidates in order of index, and finds the k-th key's bin. Any number of blocks.
//
//   x          [in]      n elements
//   residual   [in,out]  r = r + x, with 0 at the candidates written. Not used unless RESIDUAL
//   n, k       [in]      elements; entries to select
//   aligned    [in]      whether the addresses of x and residual are multiples of 16
//   capacity   [in]      maximum candidates written
//   rounds     [in]      see filter.cuh
//   indices    [out]     indices of the candidates
//   bits       [out]     bits of the candidates, in the format ACC
//   look_back  [in,out]  see lookback.cuh
//   selection  [in,out]  in: threshold, shift. Out: count, first, last, rank, retry
KERNEL void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
filter(const XBits* x, AccBits* residual, u64 n, u64 k, bool aligned, u64 capacity, u32 rounds, Index* indices, AccBits* bits,
       LookBack* look_back, Selection* selection) {
    SHARED(Bins, bins);
    clear<FILTER_THREADS>(bins);  // barriers follow before the first tile is written
    const u64 threshold = selection->threshold;
    const u32 shift = selection->shift;
    const auto take = [&](u64 to, u64 i, AccBits found) {
        indices[to] = Index(i);
        bits[to] = found;
        atomicAdd(&bins.of[bin_of<BINS>(key_of(found), threshold, shift)], 1u);
    };
    const u64 total = filter_tiles(x, residual, n, aligned, threshold, capacity, rounds, look_back, take);
    __syncthreads();
    add<FILTER_THREADS>(selection, bins);
    if (threadIdx.x == 0 && total != NOT_LAST_TILE) selection->count = total;
    if (!reset_after_last_block(look_back, filter_tile_count(n, rounds))) return;
    const u64 found = selection->count;
    if (threadIdx.x == 0) selection->retry = found > capacity || (found < k && threshold > 1);
    const bool all_win = found <= k || found > capacity;
    pick_bin<FILTER_THREADS>(selection, all_win, threshold, threshold, MAX_KEY<AccBits>, shift, k);
}
