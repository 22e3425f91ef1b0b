// From candidates to the top-k: `refine` finds the k-th key, `emit` writes the winners in order.
//
// Compiled for ACC, the format of the candidates, and INDEX. Grids are by the capacity for candidates; blocks beyond
// their number leave at once. Both do nothing if `retry` is set.
#pragma once

#include "select.cuh"

using namespace sparsecomm;

using Key = ACC::Bits;
constexpr u32 EMIT_TILE = EMIT_THREADS * EMIT_ITEMS;

// Reads the candidates' bits once; gathers those of the k-th key's bin into `survivors`, which has room for all.
KERNEL void __launch_bounds__(REFINE_THREADS)
refine(const Key* bits, Key* survivors, Selection* s) {
    const u64 wanted = s->bin, threshold = s->threshold, count = s->retry ? 0 : s->count;
    const u32 shift = s->shift;
    if (wanted != NO_BIN) {
        for (u64 i = u64(blockIdx.x) * REFINE_THREADS + threadIdx.x; i < count; i += u64(gridDim.x) * REFINE_THREADS) {
            const Key key = sparsecomm::key_of(bits[i], ACC::infinity);
            if (bin_of(key, threshold, shift) == wanted) survivors[atomicAdd(&s->survivors, 1ull)] = key;
        }
    }
    if (!is_last_block(&s->left)) return;
    u64 kth = 0, ties = 0;
    if (wanted != NO_BIN && count > 0) {
        const bool open = wanted == BINS - 1;  // the last bin has no upper end
        const u64 first = open ? threshold : threshold + (wanted << shift);
        find_kth<REFINE_THREADS>(survivors, s->survivors, first, open ? KEY_BITS<Key> : shift, s->rank, &kth, &ties);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s->kth = kth;
        s->ties = ties;
        s->survivors = 0;
    }
}

// The winners to `kept`; the others, if `lost_indices` is given, to `lost`, and if `residual` is given, there. Both
// counts are written. In order of index: greater keys and ties are counted together, in two halves of one word.
KERNEL void __launch_bounds__(EMIT_THREADS)
emit(const INDEX* indices, const Key* bits, INDEX* kept_indices, ACC::Accumulator* kept_values, INDEX* lost_indices,
     ACC::Accumulator* lost_values, Key* residual, u64* kept_count, u64* lost_count, LookBack* tiles, const Selection* s) {
    constexpr u64 TIE = 1ull << 31;
    const u32 tile = tile_ticket(tiles);
    const u64 count = s->retry ? 0 : s->count, kth = s->kth, ties = s->ties;
    const u64 begin = u64(tile) * EMIT_TILE + u64(threadIdx.x) * EMIT_ITEMS;
    if (u64(tile) * EMIT_TILE < count) {
        Key found[EMIT_ITEMS];
        u64 mine = 0, all;
        UNROLL
        for (u32 i = 0; i < EMIT_ITEMS; i++) {
            found[i] = begin + i < count ? bits[begin + i] : Key(0);
            const u64 key = sparsecomm::key_of(found[i], ACC::infinity);
            mine += begin + i >= count ? 0 : key > kth ? 1 : key == kth ? TIE : 0;
        }
        const u64 within = block_scan<EMIT_THREADS>(mine, &all);
        const u64 before = exclusive_prefix(tiles, tile, all);
        u64 greater = ((before + within) & (TIE - 1)), equal = (before + within) >> 31;
        UNROLL
        for (u32 i = 0; i < EMIT_ITEMS; i++) {
            if (begin + i >= count) break;
            const u64 key = sparsecomm::key_of(found[i], ACC::infinity);
            const u64 won = greater + (equal < ties ? equal : ties);  // so far
            const bool wins = key > kth || (key == kth && equal < ties);
            const INDEX where = indices[begin + i];
            if (wins) {
                kept_indices[won] = where;
                kept_values[won] = ACC::widen(canonical<ACC>(found[i]));
            } else {
                if (lost_indices != nullptr) {
                    lost_indices[begin + i - won] = where;
                    lost_values[begin + i - won] = ACC::widen(canonical<ACC>(found[i]));
                }
                if (residual != nullptr) residual[where] = found[i];
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
    if (count == 0 && tile == 0 && threadIdx.x == 0 && !s->retry) {
        *kept_count = 0;
        if (lost_count != nullptr) *lost_count = 0;
    }
    leave(tiles, gridDim.x);
}
