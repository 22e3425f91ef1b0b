// Sums, maxima and prefix sums over the lanes of a warp, and prefix sums over the threads of a block.
#pragma once

#include "platform.cuh"

namespace sparsecomm {

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// Returns the inclusive prefix sum over the lanes. All lanes call it.
template <class T>
DEVICE T warp_scan(T v) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 d = 1; d < WARP; d *= 2) {
        const T below = __shfl_up_sync(ALL_LANES, v, d);
        if (lane >= d) v += below;
    }
    return v;
}

// Returns the sum over all lanes. All lanes call it.
template <class T>
DEVICE T warp_sum(T v) {
    for (u32 d = WARP / 2; d > 0; d /= 2) v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}

// Returns the largest value of all lanes. All lanes call it.
template <class T>
DEVICE T warp_max(T v) {
    for (u32 d = WARP / 2; d > 0; d /= 2) {
        const T other = __shfl_xor_sync(ALL_LANES, v, d);
        v = v > other ? v : other;
    }
    return v;
}

// Returns the exclusive prefix sum over the threads of a block. All BLOCK threads call it.
//
//   v      [in]   this thread's addend
//   total  [out]  the sum over all threads
template <u32 BLOCK, class T>
DEVICE T block_scan(T v, T* total) {
    constexpr u32 WARPS = BLOCK / WARP;
    static_assert(BLOCK % WARP == 0 && WARPS <= WARP, "whole warps, whose sums one warp can add");
    struct Sums {
        T warp[WARPS];
    };
    SHARED(Sums, sums);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const T inclusive = warp_scan(v);
    __syncthreads();  // all threads have read the previous call's sums
    if (lane == WARP - 1) sums.warp[warp] = inclusive;
    __syncthreads();
    const T mine = lane < WARPS ? sums.warp[lane] : T(0), through = warp_scan(mine);  // in every warp
    *total = __shfl_sync(ALL_LANES, through, WARP - 1);
    return __shfl_sync(ALL_LANES, T(through - mine), int(warp)) + inclusive - v;
}

}  // namespace sparsecomm
