// From candidates to the top-k: finds the k-th key, and writes the winners in order.
//
// Compiled for ACC, the format of the candidates, and INDEX.
#pragma once

#include "select.cuh"

using namespace sparsecomm;

using Key = ACC::Bits;
constexpr u32 EMIT_TILE = EMIT_THREADS * EMIT_ITEMS;

// Finds the k-th key, then writes the winners, and the losers if wanted. Any number of blocks. Does nothing if `retry` is set.
// Deterministic.
//
// The blocks work in steps, as in radix.cu. In each step, they count the keys that may be the k-th in BINS bins, and the last
// block keeps the bin of the k-th: `filter` leaves one step for float32, none for 16-bit formats, and about two for float64. A
// step reads the candidates' bits. Then each block takes EMIT_TILE candidates at a time, reads and writes each once, and counts
// greater keys and ties in the two halves of one word.
//
//   indices, bits              [in]      selection->count candidates in order of index
//   kept_indices, kept_values  [out]     winners in order of index; room for k
//   lost_indices, lost_values  [out]     losers in order of index; or null
//   residual                   [in,out]  receives the bits of losers at their indices; or null
//   kept_count, lost_count     [out]     number of each; lost_count may be null
//   look_back                  [in,out]  see lookback.cuh
//   selection                  [in,out]  count, first, last, rank, retry
KERNEL void __launch_bounds__(EMIT_THREADS)
emit(const INDEX* indices, const Key* bits, INDEX* kept_indices, ACC::Accumulator* kept_values, INDEX* lost_indices,
     ACC::Accumulator* lost_values, Key* residual, u64* kept_count, u64* lost_count, LookBack* look_back, Selection* selection) {
    constexpr u64 TIE = 1ull << 31;
    const u64 count = selection->retry ? 0 : selection->count;
    while (true) {
        const u32 part = take_part(&selection->ticket, &selection->steps_done);
        const u64 first = selection->first, last = selection->last, rank = selection->rank;
        if (first == last) break;
        u32 shift = 0;
        while ((last - first) >> shift >= BINS) shift++;
        for (u64 begin = u64(part) * EMIT_TILE; begin < count; begin += u64(gridDim.x) * EMIT_TILE) {
            Key found[EMIT_ITEMS];
            const u64 mine = begin + threadIdx.x;
            UNROLL
            for (u32 i = 0; i < EMIT_ITEMS; i++) found[i] = mine + i * EMIT_THREADS < count ? bits[mine + i * EMIT_THREADS] : Key(0);
            UNROLL
            for (u32 i = 0; i < EMIT_ITEMS; i++) {
                const u64 key = sparsecomm::key_of(found[i], ACC::infinity);
                add_bins(selection, first <= key && key <= last, (key - first) >> shift);  // first > 0: see `pick_bin`
            }
        }
        if (!is_last_block(&selection->parts_done)) continue;
        pick_bin<EMIT_THREADS>(selection, false, first, first, last, shift, rank);
        end_step(&selection->steps_done);
    }
    const u64 kth = selection->first, ties = selection->rank;
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
    if (!reset_after_last_block(look_back, u32((count + EMIT_TILE - 1) / EMIT_TILE)) || threadIdx.x != 0) return;
    selection->ticket = selection->steps_done = 0;
}
