// From candidates to the top-k: `refine` finds the k-th key, `emit` writes the winners in order.
//
// Compiled for ACC, the format of the candidates, and INDEX. Any number of blocks. Both kernels do nothing if `retry` is
// set. Deterministic: the r-th largest of the keys that `refine` gathers does not depend on their order, and `emit` keeps
// the order of indices.
#pragma once

#include "select.cuh"

using namespace sparsecomm;

using Key = ACC::Bits;
constexpr u32 EMIT_TILE = EMIT_THREADS * EMIT_ITEMS;

// Finds the k-th key among the candidates. Reads the candidates' bits once, and the keys of one bin a few times.
//
//   bits       [in]      bits of the selection->count candidates
//   survivors  [out]     scratch, with room for as many keys: the keys in the k-th key's bin
//   selection  [in,out]  in: threshold, count, bin, rank, shift, retry. Out: kth, ties
KERNEL void __launch_bounds__(REFINE_THREADS)
refine(const Key* bits, Key* survivors, Selection* selection) {
    const u64 wanted = selection->bin, threshold = selection->threshold, count = selection->retry ? 0 : selection->count;
    const u32 shift = selection->shift;
    if (wanted != NO_BIN) {
        const u64 threads = u64(gridDim.x) * REFINE_THREADS;
        for (u64 i = u64(blockIdx.x) * REFINE_THREADS + threadIdx.x; i < count; i += threads * REFINE_ITEMS) {
            Key found[REFINE_ITEMS];
            UNROLL
            for (u32 j = 0; j < REFINE_ITEMS; j++) found[j] = i + j * threads < count ? bits[i + j * threads] : Key(0);
            UNROLL
            for (u32 j = 0; j < REFINE_ITEMS; j++) {
                const Key key = sparsecomm::key_of(found[j], ACC::infinity);
                if (i + j * threads < count && bin_of(key, threshold, shift) == wanted)
                    survivors[atomicAdd(&selection->survivors, 1ull)] = key;
            }
        }
    }
    if (!is_last_block(&selection->blocks_done)) return;
    u64 kth = 0, ties = 0;
    if (wanted != NO_BIN && count > 0) {
        const bool open = wanted == 0 || wanted == BINS - 1;  // the first bin is unbounded below, the last above
        const u64 first = wanted == 0 ? 0 : threshold + (wanted << shift);
        find_kth<REFINE_THREADS>(survivors, selection->survivors, first, open ? KEY_BITS<Key> : shift, selection->rank, &kth, &ties);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        selection->kth = kth;
        selection->ties = ties;
        selection->survivors = 0;
    }
}

// Writes the winners, and the losers if wanted. Each block takes EMIT_TILE candidates at a time. Reads the candidates once
// and writes each once. Greater keys and ties are counted in the two halves of one word.
//
//   indices, bits              [in]      selection->count candidates in order of index
//   kept_indices, kept_values  [out]     winners in order of index; room for k
//   lost_indices, lost_values  [out]     losers in order of index; or null
//   residual                   [in,out]  receives the bits of losers at their indices; or null
//   kept_count, lost_count     [out]     number of each; lost_count may be null
//   look_back                  [in,out]  see lookback.cuh
//   selection                  [in]      count, kth, ties, retry
KERNEL void __launch_bounds__(EMIT_THREADS)
emit(const INDEX* indices, const Key* bits, INDEX* kept_indices, ACC::Accumulator* kept_values, INDEX* lost_indices,
     ACC::Accumulator* lost_values, Key* residual, u64* kept_count, u64* lost_count, LookBack* look_back, const Selection* selection) {
    constexpr u64 TIE = 1ull << 31;
    const u64 count = selection->retry ? 0 : selection->count, kth = selection->kth, ties = selection->ties;
    while (true) {
        const u32 tile = tile_ticket(look_back);
        if (u64(tile) * EMIT_TILE >= count) break;
        const u64 begin = u64(tile) * EMIT_TILE + u64(threadIdx.x) * EMIT_ITEMS;
        Key found[EMIT_ITEMS];
        u64 mine = 0, all;
        UNROLL
        for (u32 i = 0; i < EMIT_ITEMS; i++) {
            found[i] = begin + i < count ? bits[begin + i] : Key(0);
            const u64 key = sparsecomm::key_of(found[i], ACC::infinity);
            mine += begin + i >= count ? 0 : key > kth ? 1 : key == kth ? TIE : 0;
        }
        const u64 within = block_scan<EMIT_THREADS>(mine, &all);
        const u64 before = exclusive_prefix(look_back, tile, all);
        u64 greater = ((before + within) & (TIE - 1)), equal = (before + within) >> 31;
        UNROLL
        for (u32 i = 0; i < EMIT_ITEMS; i++) {
            if (begin + i >= count) break;
            const u64 key = sparsecomm::key_of(found[i], ACC::infinity);
            const u64 won = greater + (equal < ties ? equal : ties);  // winners before this one
            const bool wins = key > kth || (key == kth && equal < ties);
            const INDEX index = indices[begin + i];
            if (wins) {
                kept_indices[won] = index;
                kept_values[won] = ACC::widen(canonical<ACC>(found[i]));
            } else {
                if (lost_indices != nullptr) {
                    lost_indices[begin + i - won] = index;
                    lost_values[begin + i - won] = ACC::widen(canonical<ACC>(found[i]));
                }
                if (residual != nullptr) residual[index] = found[i];
            }
            greater += key > kth;
            equal += key == kth;
        }
        if (threadIdx.x == EMIT_THREADS - 1 && u64(tile + 1) * EMIT_TILE >= count) {
            const u64 won = greater + (equal < ties ? equal : ties);
            *kept_count = won;
            if (lost_count != nullptr) *lost_count = count - won;
        }
    }
    if (count == 0 && blockIdx.x == 0 && threadIdx.x == 0 && !selection->retry) {
        *kept_count = 0;
        if (lost_count != nullptr) *lost_count = 0;
    }
    reset_after_last_block(look_back, u32((count + EMIT_TILE - 1) / EMIT_TILE));
}
