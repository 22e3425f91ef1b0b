// Finds the k-th largest key among candidates, in several kernels that share a `Selection`.
//
// `count_keys` counts candidates in one of BINS equal ranges of keys, which begin at `threshold`. The last block to finish
// finds the bin of the k-th key (`pick_bin`). `refine` gathers the keys of this bin, usually few, and its last block finds
// the k-th key (`find_kth`).
#pragma once

#include "lookback.cuh"

namespace sparsecomm {

// In device memory, one per stream. Counters are zero between calls.
struct Selection {
    u64 threshold;  // where bins begin; smaller keys are in the first bin
    u64 count;      // candidates found
    u64 kth;        // the k-th largest key; greater keys win, ...
    u64 ties;       // ... and this many keys equal to it, the first ones
    u64 rank;       // of the k-th key within its bin, from 1
    u64 bin;        // of the k-th key; NO_BIN if all candidates win
    u32 shift;      // the width of a bin is 2^shift
    u32 retry;      // 1: too few candidates, or more than `capacity`; `radix` selects again
    OWN_LINE u64 survivors;    // keys of the bin gathered so far
    OWN_LINE u32 blocks_done;  // finished blocks of kernels without tiles
    OWN_LINE u32 histogram[BINS];
};
static_assert(sizeof(Selection) == SELECTION_BYTES, "as in sparsecomm/backends/cuda/modules.py");

constexpr u64 NO_BIN = ~0ull;

template <class Bits>
constexpr u32 KEY_BITS = sizeof(Bits) * 8 - 1;

DEVICE u64 bin_of(u64 key, u64 threshold, u32 shift) {
    const u64 bin = key < threshold ? 0 : (key - threshold) >> shift;
    return bin < BINS - 1 ? bin : BINS - 1;
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

// Counts the keys of the lanes that have one. Equal bins of a warp are one addition, because additions to one address wait for
// each other. All lanes call it.
DEVICE void count_keys(Selection* selection, bool has_one, u64 key, u64 threshold, u32 shift) {
    const u32 bin = has_one ? u32(bin_of(key, threshold, shift)) : BINS;
    const u32 equal = __match_any_sync(ALL_LANES, bin);
    if (has_one && threadIdx.x % WARP == u32(__ffs(int(equal))) - 1) add_keys(selection, bin, u32(__popc(equal)));
}

// Finds the r-th key from the top in a histogram of N bins. All THREADS threads call it; all get the answer.
//
//   count_at  [in]   count_at(b) is the number of keys in bin b
//   r         [in]   from 1 to the number of keys
//   bin       [out]  bin of the r-th key
//   rank      [out]  its rank within that bin, from 1
template <u32 THREADS, u32 N, class CountAt>
DEVICE void find_rank(CountAt count_at, u64 r, u32* bin, u64* rank) {
    constexpr u32 EACH = (N + THREADS - 1) / THREADS;
    struct Found {
        u32 bin;
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
            }
            above += here[i];
        }
    }
    __syncthreads();
    *bin = found.bin;
    *rank = found.rank;
    __syncthreads();
}

// Finds the bin of the k-th of `count` candidates, and clears the histogram. The last block that counted calls it.
template <u32 THREADS>
DEVICE void pick_bin(Selection* selection, u64 count, u64 k) {
    const bool all_win = count <= k;
    u32 bin = 0;
    u64 rank = 0;
    const u32* histogram = selection->histogram;
    if (!all_win) find_rank<THREADS, BINS>([=](u32 b) { return histogram[slot_of<BINS>(b)]; }, k, &bin, &rank);
    if (threadIdx.x == 0) {
        selection->count = count;
        selection->bin = all_win ? NO_BIN : bin;
        selection->rank = rank;
        selection->kth = 0;
        selection->ties = 0;
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < BINS; b += THREADS) selection->histogram[b] = 0;
}

// Finds the key of rank `rank` from the top. For at most THREADS keys, each thread ranks one; for more, in radix passes of
// 11 bits. One block calls it.
//
//   keys   [in]   `count` keys, in any order, each in [first, first + 2^bits)
//   rank   [in]   from 1 to `count`
//   kth    [out]  the key
//   ties   [out]  number of keys equal to it among the `rank` largest
template <u32 THREADS, class Key>
DEVICE void find_kth(const Key* keys, u64 count, u64 first, u32 bits, u64 rank, u64* kth, u64* ties) {
    constexpr u32 DIGIT = 11;
    struct Counts {
        u32 of[1u << DIGIT];
    };
    SHARED(Counts, counts);
    struct Found {
        u64 key[THREADS], kth, ties;
    };
    SHARED(Found, found);
    if (count <= THREADS) {
        if (threadIdx.x < count) found.key[threadIdx.x] = keys[threadIdx.x];
        __syncthreads();
        if (threadIdx.x < count) {
            const u64 key = found.key[threadIdx.x];
            u64 above = 0, equal = 0;
            bool first_of_equals = true;
            for (u32 other = 0; other < u32(count); other++) {
                above += found.key[other] > key;
                equal += found.key[other] == key;
                first_of_equals &= found.key[other] != key || other >= threadIdx.x;
            }
            if (first_of_equals && above < rank && rank <= above + equal) {
                found.kth = key;
                found.ties = rank - above;
            }
        }
        __syncthreads();
        *kth = found.kth;
        *ties = found.ties;
        return;
    }
    u64 prefix = 0;  // known bits of kth - first
    while (bits > 0) {
        const u32 digit = bits < DIGIT ? bits : DIGIT, shift = bits - digit;
        for (u32 b = threadIdx.x; b < 1u << DIGIT; b += THREADS) counts.of[b] = 0;
        __syncthreads();
        constexpr u32 AT_ONCE = 8;  // loads started before the first is used
        for (u64 i = threadIdx.x; i < count; i += THREADS * AT_ONCE) {
            Key some[AT_ONCE];
            UNROLL
            for (u32 j = 0; j < AT_ONCE; j++) some[j] = i + j * THREADS < count ? keys[i + j * THREADS] : Key(0);
            UNROLL
            for (u32 j = 0; j < AT_ONCE; j++) {
                const u64 key = some[j] - first;
                const bool matches = i + j * THREADS < count && (bits >= 64 || (key >> bits) == (prefix >> bits));
                if (matches) atomicAdd(&counts.of[(key >> shift) & ((1u << digit) - 1)], 1u);
            }
        }
        __syncthreads();
        u32 bin;
        find_rank<THREADS, (1u << DIGIT)>([&](u32 b) { return counts.of[b]; }, rank, &bin, &rank);
        prefix |= u64(bin) << shift;
        bits = shift;
    }
    *kth = first + prefix;
    *ties = rank;
}

}  // namespace sparsecomm
