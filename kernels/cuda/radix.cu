// The exact top-k by radix selection, in one launch and without a sample, for any data.
//
// Used for short vectors; if `filter` found too few or too many candidates (`retry`); and in tests, to check topk.cu, whose
// order, ties, NaN and zeros it shares. The data are split into contiguous parts, one per block. Reads them once per
// RADIX_BITS bits of a key and twice more (f32: 5 times), and writes k entries; with a residual also adds x to it.
// Deterministic: parts and threads are in order of index.
//
// The work consists of steps, each of which needs the complete previous one. Blocks take the parts of a step by ticket, and
// wait for the previous step; running blocks have then taken all of its parts. So the kernel finishes with any number of
// running blocks, even one, and needs no cooperative launch, which would wait until the whole device is free.
#include "load.cuh"
#include "select.cuh"

using namespace sparsecomm;

namespace {

constexpr u32 RADIX_BINS = 1u << RADIX_BITS;
constexpr u32 RADIX_BLOCKS = sizeof(Index) == 8 ? 1 : 0;  // minimum per multiprocessor; 1 avoids spilling

enum Stage : u32 {
#if RESIDUAL
    ADD,  // add x to the residual, or put back the candidates that `filter` took
#endif
    PASS,   // count keys with the known bits of the k-th, by their next RADIX_BITS bits
    COUNT,  // count the winners of each part
    WRITE,  // write the winners
    END
};

// In device memory. Zeros between calls, except `sums`.
struct Radix {
    u32 ticket;        // parts taken, in all steps
    OWN_LINE u64 kth;  // known bits of the k-th key; 0 if all keys win. This line changes only between steps
    u64 above;         // number of keys known to be greater
    u64 ties;          // after the last pass: number of winners equal to the k-th key
    u32 decided;       // number of known bits of the k-th key, from the highest
    u32 stage;         // of the current step
    u32 steps_done;    // completed steps
    OWN_LINE u32 parts_done;   // in the current step
    OWN_LINE u32 blocks_done;  // finished blocks
    OWN_LINE u32 histogram[RADIX_BINS];
    OWN_LINE u64 sums[2];  // of each part: number of keys above the k-th, and equal to it
};
static_assert(sizeof(Radix) == RADIX_BYTES, "as in sparsecomm/backends/cuda/modules.py");

struct Counts {
    u32 of[RADIX_BINS];
};

// Ends the step and starts `stage`. All threads of the last block of the step call it.
DEVICE void next_step(Radix* state, Stage stage) {
    if (threadIdx.x == 0) state->stage = stage;
    end_step(&state->steps_done);
}

}  // namespace

//   x                          [in]      n elements; with RESIDUAL only read if `from_start`
//   residual                   [in,out]  r = r + x, with 0 at the winners. Not used unless RESIDUAL
//   n, k                       [in]      elements; entries to select
//   aligned                    [in]      whether the addresses of x and residual are multiples of 16
//   from_start                 [in]      false: select only if selection->retry is set, after `filter` has added x to r
//   capacity, indices, bits    [in]      unless from_start: candidates that `filter` took from r, to be put back
//   kept_indices, kept_values  [out]     winners in order of index; room for min(k, n)
//   kept_count                 [out]     number of winners
//   state                      [in,out]  zeros, with `sums` for each part
//   selection                  [in]      unless from_start: retry, count
KERNEL void __launch_bounds__(RADIX_THREADS, RADIX_BLOCKS)
radix(const XBits* x, AccBits* residual, u64 n, u64 k, bool aligned, bool from_start, u64 capacity, const Index* indices,
      const AccBits* bits, Index* kept_indices, Acc::Accumulator* kept_values, u64* kept_count, Radix* state,
      const Selection* selection) {
    if (!from_start && !selection->retry) return;
    constexpr u64 ROW = u64(RADIX_THREADS) * VECTOR;
    const u64 rows = (n + ROW - 1) / ROW, part_size = (rows + gridDim.x - 1) / gridDim.x * ROW;
    const u64 thread = u64(threadIdx.x) * VECTOR;
#if RESIDUAL
    const AccBits* data = residual;
#else
    const AccBits* data = x;
#endif
    while (true) {
        const u32 part = take_part(&state->ticket, &state->steps_done);
        if (state->stage == END) break;
        const u64 begin = part * part_size, end = begin + part_size < n ? begin + part_size : n;
        const u32 stage = state->stage;
        const u64 kth = state->kth, ties = state->ties;
#if RESIDUAL
        if (stage == ADD) {
            if (from_start) {
                for (u64 i = begin + thread; i < end; i += ROW)
                    store_group(residual, i, n, aligned, accumulated(x, residual, i, n, aligned));
            } else {  // put back the candidates
                const u64 stored = selection->count < capacity ? selection->count : capacity;
                for (u64 i = u64(part) * RADIX_THREADS + threadIdx.x; i < stored; i += u64(gridDim.x) * RADIX_THREADS)
                    residual[indices[i]] = bits[i];
            }
            if (is_last_block(&state->parts_done)) next_step(state, PASS);
        }
#endif
        if (stage == PASS) {
            const u32 open = KEY_BITS<AccBits> - state->decided, digit = open < RADIX_BITS ? open : RADIX_BITS;
            const u32 shift = open - digit;
            SHARED(Counts, counts);
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) counts.of[b] = 0;
            __syncthreads();
            for (u64 i = begin + thread; i < end; i += ROW) {
                const Group<AccBits> g = load_group(data, i, n, aligned);
                UNROLL
                for (u32 e = 0; e < VECTOR; e++) {
                    const u64 key = key_of(g.get(e));
                    if (key && (key >> open) == (kth >> open)) atomicAdd(&counts.of[(key >> shift) & ((1u << digit) - 1)], 1u);
                }
            }
            __syncthreads();
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS)
                if (counts.of[b]) atomicAdd(&state->histogram[b], counts.of[b]);
            if (!is_last_block(&state->parts_done)) continue;
            u64 mine = 0, all;
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) mine += state->histogram[b];
            block_scan<RADIX_THREADS>(mine, &all);
            const bool all_win = state->decided == 0 && all <= k;
            u32 bin = 0;
            u64 rank = 0;
            const u32* histogram = state->histogram;
            const auto count_at = [=](u32 b) { return histogram[b]; };
            if (!all_win) find_rank<RADIX_THREADS, RADIX_BINS>(count_at, k - state->above, &bin, &rank);
            __syncthreads();
            for (u32 b = threadIdx.x; b < RADIX_BINS; b += RADIX_THREADS) state->histogram[b] = 0;
            if (threadIdx.x == 0) {
                state->kth = kth | u64(bin) << shift;
                state->above = k - rank;
                state->ties = rank;
                state->decided += digit;
            }
            next_step(state, all_win || shift == 0 ? COUNT : PASS);
        } else if (stage == COUNT) {
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
                state->sums[2 * part] = all_greater;
                state->sums[2 * part + 1] = all_equal;
            }
            if (is_last_block(&state->parts_done)) next_step(state, WRITE);
        } else if (stage == WRITE) {
            u64 greater = 0, equal = 0;
            for (u32 b = threadIdx.x; b < part; b += RADIX_THREADS) {
                greater += state->sums[2 * b];
                equal += state->sums[2 * b + 1];
            }
            u64 greater_before, equal_before;
            block_scan<RADIX_THREADS>(greater, &greater_before);
            block_scan<RADIX_THREADS>(equal, &equal_before);
            for (u64 row = begin; row < end; row += ROW) {
                const Group<AccBits> g = load_group(data, row + thread, n, aligned);
                u64 mine = 0, all;  // greater keys in the lower half, ties in the upper
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
            if (threadIdx.x == 0 && part == gridDim.x - 1)
                *kept_count = greater_before + (equal_before < ties ? equal_before : ties);
            if (is_last_block(&state->parts_done)) next_step(state, END);
        }
    }
    if (!is_last_block(&state->blocks_done) || threadIdx.x != 0) return;
    state->ticket = state->steps_done = state->stage = state->decided = 0;
    state->kth = state->above = state->ties = 0;
}
