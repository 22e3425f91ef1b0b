// Finds the k-th largest key among candidates, in several kernels that share a `Selection`.
//
// The first kernel counts candidates in BINS equal ranges of keys, which begin at `threshold`. The last block to finish finds
// the bin of the k-th key (`pick_bin`). `emit` counts the keys of this bin, usually few, in smaller bins, until one key is
// left.
#pragma once

#include "lookback.cuh"

namespace sparsecomm {

// In device memory, one per stream. Counters are zero between calls.
struct Selection {
    u64 threshold;   // of candidates
    u64 count;       // candidates found
    u64 first;       // the k-th largest key is in [first, last]; greater keys win. This line changes only between steps
    u64 last;
    u64 rank;        // of the k-th key in this range, from 1; if first == last, as many of the equal keys win, the first ones
    u32 shift;       // the width of `filter`'s bins is 2^shift
    u32 retry;       // 1: too few candidates, or more than `capacity`; `radix` selects again
    u32 steps_done;  // of `emit`
    OWN_LINE u32 ticket;      // parts taken, in all steps
    OWN_LINE u32 parts_done;  // in the current step
    OWN_LINE u32 histogram[BINS];
};
static_assert(sizeof(Selection) == SELECTION_BYTES, "as in sparsecomm/backends/cuda/modules.py");

template <class Bits>
constexpr u32 KEY_BITS = sizeof(Bits) * 8 - 1;
template <class Bits>
constexpr u64 MAX_KEY = (1ull << KEY_BITS<Bits>) - 1;

// Returns the bin of a key: N bins begin at `begin`, and the first and the last also contain all keys below and above.
template <u32 N>
DEVICE u32 bin_of(u64 key, u64 begin, u32 shift) {
    const u64 bin = key < begin ? 0 : (key - begin) >> shift;
    return bin < N - 1 ? u32(bin) : N - 1;
}

// Returns the position of bin b of N in device memory. Neighbouring bins are in different sectors of 32 bytes, because many
// blocks add to neighbouring bins at the same time. `bin_at` is the inverse.
template <u32 N>
DEVICE u32 slot_of(u32 b) { return b % (N / 8) * 8 + b / (N / 8); }
template <u32 N>
DEVICE u32 bin_at(u32 slot) { return slot % 8 * (N / 8) + slot / 8; }

DEVICE void add_keys(Selection* selection, u32 bin, u32 count) { atomicAdd(&selection->histogram[slot_of<BINS>(bin)], count); }

// Counts of a block, in shared memory, because additions to one address of device memory wait for each other.
struct Bins {
    u32 of[BINS];
};

template <u32 THREADS>
DEVICE void clear(Bins& bins) {
    for (u32 b = threadIdx.x; b < BINS; b += THREADS) bins.of[b] = 0;
}

template <u32 THREADS>
DEVICE void add(Selection* selection, const Bins& bins) {
    for (u32 b = threadIdx.x; b < BINS; b += THREADS)
        if (bins.of[b]) add_keys(selection, b, bins.of[b]);
}

// Adds the bins of the lanes that have one. Equal bins of a warp are one addition, because additions to one address wait for
// each other. All lanes call it.
DEVICE void add_bins(Selection* selection, bool has_one, u64 of_lane) {
    if (!__any_sync(ALL_LANES, has_one)) return;
    const u32 bin = has_one ? u32(of_lane) : BINS;
    const u32 equal = __match_any_sync(ALL_LANES, bin);
    if (has_one && threadIdx.x % WARP == u32(__ffs(int(equal))) - 1) add_keys(selection, bin, u32(__popc(equal)));
}

// Finds the r-th key from the top in a histogram of N bins. All THREADS threads call it; all get the answer.
//
//   count_at  [in]   count_at(b) is the number of keys in bin b
//   r         [in]   from 1 to the number of keys
//   bin       [out]  bin of the r-th key
//   rank      [out]  its rank within that bin, from 1
//
// Returns whether it is the last key of its bin.
template <u32 THREADS, u32 N, class CountAt>
DEVICE bool find_rank(CountAt count_at, u64 r, u32* bin, u64* rank) {
    constexpr u32 EACH = (N + THREADS - 1) / THREADS;
    struct Found {
        u32 bin;
        bool last;
        u64 rank;
    };
    SHARED(Found, found);
    const i64 top = i64(N) - 1 - i64(threadIdx.x) * EACH;  // this thread's bins: top, top - 1, ...
    u32 here[EACH];
    u64 mine = 0, all;
    UNROLL
    for (u32 i = 0; i < EACH; i++) {
        here[i] = top - i64(i) >= 0 ? u32(count_at(u32(top - i64(i)))) : 0;
        mine += here[i];
    }
    u64 above = block_scan<THREADS, u64>(mine, &all);
    if (above < r && r <= above + mine) {
        UNROLL
        for (u32 i = 0; i < EACH; i++) {
            if (above < r && r <= above + here[i]) {
                found.bin = u32(top - i64(i));
                found.rank = r - above;
                found.last = found.rank == here[i];
            }
            above += here[i];
        }
    }
    __syncthreads();
    *bin = found.bin;
    *rank = found.rank;
    const bool last = found.last;
    __syncthreads();
    return last;
}

// Narrows the range of the k-th key to one bin, and clears the histogram. The last block that counted calls it.
//
//   all_win  [in]  whether all keys win; the range is then empty
//   lowest   [in]  the lowest key of the first bin
//   begin    [in]  where bins begin, each of 2^shift keys
//   last     [in]  the highest key of the last bin
//   rank     [in]  of the k-th key among the keys counted, from 1 to their number, unless `all_win`
template <u32 THREADS>
DEVICE void pick_bin(Selection* selection, bool all_win, u64 lowest, u64 begin, u64 last, u32 shift, u64 rank) {
    u32 bin = 0;
    const u32* histogram = selection->histogram;
    const auto count_at = [=](u32 b) { return histogram[slot_of<BINS>(b)]; };
    const bool bin_wins = all_win || find_rank<THREADS, BINS>(count_at, rank, &bin, &rank);
    if (threadIdx.x == 0) {
        const u64 first = all_win ? 1 : bin == 0 ? lowest : begin + (u64(bin) << shift);
        const u64 end = begin + (u64(bin + 1) << shift);
        selection->first = bin_wins ? first - 1 : first;  // without ties
        selection->last = bin_wins ? first - 1 : bin == BINS - 1 || end > last ? last : end - 1;
        selection->rank = bin_wins ? 0 : rank;
    }
    for (u32 b = threadIdx.x; b < BINS; b += THREADS) selection->histogram[b] = 0;
}

}  // namespace sparsecomm
