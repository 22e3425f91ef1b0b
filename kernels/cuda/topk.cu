// The exact top-k by |v|, in one pass over the data and a few over the candidates.
//
//   sample   a lower bound on the k-th key, from a sample           reads up to 1 MB
//   filter   r = r + x; every entry from that bound on, in order    reads 4n (f32), with a residual 8n, and writes 4n
//   refine   the k-th key among these                               reads them
//   emit     the winners, in order; the others back to the residual reads them, writes 8k
//   radix    all over again, if the sample was wrong (radix.cu)     reads one flag
//
// Grids: sample SAMPLE_SECTORS / SAMPLE_THREADS blocks or fewer; the others as many as run at once, or fewer for short
// vectors.
// Order: |v| descending, index ascending; the k-th and later ties lose. NaN is above infinity. Zeros are never selected:
// of fewer than k other entries all are. k > n selects as k = n. Deterministic: the sample's positions are fixed, and it
// decides how fast the result comes, never what it is. Atomics count, and counts do not depend on order.
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

constexpr u32 SECTOR = 32 / sizeof(XBits);  // elements read together by the sample
constexpr u32 SAMPLE_SHIFT = KEY_BITS<AccBits> - 13;
static_assert(SAMPLE_BINS == 1u << 13, "bins by the 13 highest bits of keys");

// All bins together cover two octaves: the k-th key is seldom further above the threshold.
constexpr u32 BIN_SHIFT = sizeof(AccBits) == 8 ? 42 : sizeof(AccBits) == 4 ? 12 : 0;

DEVICE u64 scattered(u64 i) {  // splitmix64: Steele, Lea & Flood, 2014
    i += 0x9e3779b97f4a7c15ull;
    i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9ull;
    i = (i ^ (i >> 27)) * 0x94d049bb133111ebull;
    return i ^ (i >> 31);
}

}  // namespace

// Finds a threshold that a few more than k entries are expected to reach. Any number of blocks; a thread reads a sector of
// 32 bytes: a random one of each of `sectors` equal strata.
//
//   x, residual  [in]      n elements each; the residual is not used unless RESIDUAL
//   n            [in]      elements, at least SECTOR * sectors
//   aligned      [in]      whether x and residual are at a multiple of 16 bytes
//   sectors      [in]      to look at
//   wanted       [in]      how many elements of the sample are to be candidates; of fewer non-zeros all are
//   state        [in,out]  zeros
//   selection    [out]     threshold, shift
KERNEL void __launch_bounds__(SAMPLE_THREADS, 1)
sample(const XBits* x, const AccBits* residual, u64 n, bool aligned, u64 sectors, u64 wanted, Sample* state, Selection* selection) {
    struct Counts {
        u32 of[SAMPLE_BINS + SAMPLE_BINS / WARP];  // bin b at b + b / WARP: EACH of `find_rank` apart are other banks
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
                if (key) atomicAdd(&counts.of[place(key >> SAMPLE_SHIFT)], 1u);
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
        const u64 threshold = u64(bin) << SAMPLE_SHIFT;
        selection->threshold = threshold ? threshold : 1;
        selection->shift = BIN_SHIFT;
    }
}

// Writes the candidates in order of index, and finds the k-th key's bin. Any number of blocks.
//
//   x          [in]      n elements
//   residual   [in,out]  r = r + x, and 0 at the candidates written. Not used unless RESIDUAL
//   n, k       [in]      elements; entries to select
//   aligned    [in]      whether x and residual are at a multiple of 16 bytes
//   capacity   [in]      candidates for which there is room
//   indices    [out]     of the candidates
//   bits       [out]     of the candidates, as the residual would have them
//   look_back  [in,out]  see lookback.cuh
//   selection  [in,out]  in: threshold, shift. Out: count, bin, rank, retry
KERNEL void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
filter(const XBits* x, AccBits* residual, u64 n, u64 k, bool aligned, u64 capacity, Index* indices, AccBits* bits,
       LookBack* look_back, Selection* selection) {
    const u64 threshold = selection->threshold;
    const u32 shift = selection->shift;
    const u64 total = filter_tiles(x, residual, n, aligned, threshold, capacity, look_back, [&](u64 to, u64 i, AccBits found) {
        indices[to] = Index(i);
        bits[to] = found;
        count_key(selection, key_of(found), threshold, shift);
    });
    if (threadIdx.x == 0 && total != NOT_LAST_TILE) selection->count = total;
    if (!reset_after_last_block(look_back, filter_tile_count(n))) return;
    const u64 found = selection->count;
    if (threadIdx.x == 0) selection->retry = found > capacity || (found < k && threshold > 1);
    pick_bin<FILTER_THREADS>(selection, found, found > capacity ? found : k);
}
