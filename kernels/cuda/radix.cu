// The exact top-k by radix selection, in one cooperative launch: whatever the data are, with no sample.
//
// It runs for short vectors; when `filter` found too few candidates or too many (`retry`); and as the oracle of the
// other way. Order, ties, NaN and zeros are those of topk.cu. Every block has one contiguous part of the data. Reads them
// once per RADIX_BITS bits of a key and twice more (f32: 5 times), writes k entries; with a residual reads and writes that
// too. All blocks must be resident, since they wait for each other. Deterministic: blocks and threads are in order of index.
#include "load.cuh"
#include "select.cuh"

using namespace sparsecomm;

namespace {

constexpr u32 RADIX_BINS = 1u << RADIX_BITS;

// In device memory; zeros between calls, but for `sums`.
struct Radix {
    u32 arrived;  // at the grid barrier, by all blocks, since the kernel began
    OWN_LINE u32 blocks_done;
    OWN_LINE u32 histogram[3][RADIX_BINS];  // one filled, one read, one being cleared
    OWN_LINE u64 sums[2];                   // of each block: keys above the k-th, and equal to it
};
static_assert(sizeof(Radix) == RADIX_BYTES, "as in sparsecomm/backends/cuda/workspace.py");

struct Counts {
    u32 of[RADIX_BINS];
};

// Waits until all blocks have come here; what was written before is seen after. All threads call it. `goal`: what
// `arrived` must reach, counted on by each call, 0 before the first.
DEVICE void grid_barrier(Radix* state, u32* goal) {
    *goal += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&state->arrived, 1u);
        while (load_acquire(&state->arrived) < *goal) pause();
        __threadfence();
    }
    __syncthreads();
}

}  // namespace

//   x                          [in]      n elements; not read unless `from_start`, or without RESIDUAL
//   residual                   [in,out]  r = r + x, and 0 at the winners. Not used unless RESIDUAL
//   n, k                       [in]      elements; entries to select
//   aligned                    [in]      whether x and residual are at a multiple of 16 bytes
//   from_start                 [in]      false: select only if selection->retry is set, after `filter` has added x to r
//   capacity, indices, bits    [in]      the candidates that `filter` took out of r, which go back first; unless from_start
//   kept_indices, kept_values  [out]     the winners, in order of index; room for min(k, n)
//   kept_count                 [out]     winners
//   state                      [in,out]  zeros, with `sums` for each block
//   selection                  [in]      retry, count; unless from_start
KERNEL void __launch_bounds__(RADIX_THREADS)
radix(const XBits* x, AccBits* residual, u64 n, u64 k, bool aligned, bool from_start, u64 capacity, const Index* indices,
      const AccBits* bits, Index* kept_indices, Acc::Accumulator* kept_values, u64* kept_count, Radix* state,
      const Selection* selection) {
    if (!from_start && !selection->retry) return;
    constexpr u64 ROW = u64(RADIX_THREADS) * VECTOR;
    const u64 rows = (n + ROW - 1) / ROW, rows_per_block = (rows + gridDim.x - 1) / gridDim.x;
    const u64 begin = blockIdx.x * rows_per_block * ROW, end = begin + rows_per_block * ROW < n ? begin + rows_per_block * ROW : n;
    const u64 thread = u64(threadIdx.x) * VECTOR;
    u32 goal = 0;
#if RESIDUAL
    if (from_start) {
        for (u64 i = begin + thread; i < end; i += ROW)
            store_group(residual, i, n, aligned, accumulated(x, residual, i, n, aligned));
    } else {  // what `filter` took
        const u64 stored = selection->count < capacity ? selection->count : capacity;
        for (u64 i = u64(blockIdx.x) * RADIX_THREADS + threadIdx.x; i < stored; i += u64(gridDim.x) * RADIX_THREADS)
            residual[indices[i]] = bits[i];
    }
    grid_barrier(state, &goal);
    const AccBits* data = residual;
#else
    const AccBits* data = x;
#endif

    // The k-th key, RADIX_BITS at a time from the top; `prefix` is what is known of it.
    u64 prefix = 0, rank = k;
    u32 open = KEY_BITS<AccBits>;
    bool all_win = false;
    for (u32 pass = 0; open > 0 && !all_win; pass++) {
        const u32 digit = open < RADIX_BITS ? open : RADIX_BITS, shift = open - digit;
        u32* histogram = state->histogram[pass % 3];
        SHARED(Counts, counts);
        for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) counts.of[b] = 0;
        __syncthreads();
        for (u64 i = begin + thread; i < end; i += ROW) {
            const Group<AccBits> g = load_group(data, i, n, aligned);
            UNROLL
            for (u32 e = 0; e < VECTOR; e++) {
                const u64 key = key_of(g.get(e));
                if (key && (key >> open) == (prefix >> open))
                    atomicAdd(&counts.of[(key >> shift) & ((1u << digit) - 1)], 1u);
            }
        }
        __syncthreads();
        for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS)
            if (counts.of[b]) atomicAdd(&histogram[b], counts.of[b]);
        grid_barrier(state, &goal);
        if (pass == 0) {
            u64 mine = 0, all;
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) mine += histogram[b];
            block_scan<RADIX_THREADS>(mine, &all);
            all_win = all <= k;
        }
        if (!all_win) {
            u32 bin;
            find_rank<RADIX_THREADS, RADIX_BINS>(histogram, rank, &bin, &rank);
            prefix |= u64(bin) << shift;
        }
        if (blockIdx.x == 0)  // read by all before this pass; filled again in the next but one
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) state->histogram[(pass + 2) % 3][b] = 0;
        open = shift;
    }
    const u64 kth = all_win ? 0 : prefix, ties = all_win ? 0 : rank;

    // How many each block has, and so where its winners go.
    u64 greater = 0, equal = 0;
    for (u64 i = begin + thread; i < end; i += ROW) {
        const Group<AccBits> g = load_group(data, i, n, aligned);
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            const u64 key = key_of(g.get(e));
            greater += key > kth;
            equal += key == kth && key != 0;
        }
    }
    u64 all_greater, all_equal;
    block_scan<RADIX_THREADS>(greater, &all_greater);
    block_scan<RADIX_THREADS>(equal, &all_equal);
    if (threadIdx.x == 0) {
        state->sums[2 * blockIdx.x] = all_greater;
        state->sums[2 * blockIdx.x + 1] = all_equal;
    }
    grid_barrier(state, &goal);
    greater = 0, equal = 0;
    for (u32 b = threadIdx.x; b < blockIdx.x; b += RADIX_THREADS) {
        greater += state->sums[2 * b];
        equal += state->sums[2 * b + 1];
    }
    u64 greater_before, equal_before;
    block_scan<RADIX_THREADS>(greater, &greater_before);
    block_scan<RADIX_THREADS>(equal, &equal_before);

    // Row by row, in order.
    for (u64 row = begin; row < end; row += ROW) {
        const Group<AccBits> g = load_group(data, row + thread, n, aligned);
        u64 mine = 0, all;  // keys above in the lower half, ties in the upper one
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            const u64 key = key_of(g.get(e));
            mine += key > kth ? 1 : key == kth && key != 0 ? 1ull << 32 : 0;
        }
        const u64 within = block_scan<RADIX_THREADS>(mine, &all);
        u64 above = greater_before + (within & 0xffffffffu), tied = equal_before + (within >> 32);
        UNROLL
        for (u32 e = 0; e < VECTOR; e++) {
            const u64 key = key_of(g.get(e));
            if (key > kth || (key == kth && key != 0 && tied < ties)) {
                const u64 to = above + (tied < ties ? tied : ties), i = row + thread + e;
                kept_indices[to] = Index(i);
                kept_values[to] = value_of(g.get(e));
#if RESIDUAL
                residual[i] = 0;
#endif
            }
            above += key > kth;
            tied += key == kth && key != 0;
        }
        greater_before += all & 0xffffffffu;
        equal_before += all >> 32;
    }
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1)
        *kept_count = greater_before + (equal_before < ties ? equal_before : ties);
    if (!is_last_block(&state->blocks_done)) return;
    for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS)
        state->histogram[0][b] = state->histogram[1][b] = state->histogram[2][b] = 0;
    if (threadIdx.x == 0) state->arrived = 0;
}
