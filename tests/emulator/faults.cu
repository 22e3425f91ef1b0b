// Kernels that are wrong, each in one way that the emulator must report. Never compiled for a device.
#include "lookback.cuh"

using namespace sparsecomm;

// The first warp is gone when the second comes to the barrier.
KERNEL void __launch_bounds__(64) barrier_passed_by(u32* out) {
    if (threadIdx.x < WARP) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

// Lane 5 went on to the barrier that the others reach only later.
KERNEL void __launch_bounds__(64) ballot_beside_barrier(u32* out) {
    if (threadIdx.x != 5) out[threadIdx.x] = __ballot_sync(ALL_LANES, 1);
    __syncthreads();
}

// Half a warp in one operation, half in another.
KERNEL void __launch_bounds__(32) different_operations(u32* out) {
    out[threadIdx.x] = threadIdx.x < 16 ? __ballot_sync(ALL_LANES, 1) : u32(__any_sync(ALL_LANES, 1));
}

// All lanes in a ballot, of which each half thinks that others take part.
KERNEL void __launch_bounds__(32) different_masks(u32* out) {
    out[threadIdx.x] = __ballot_sync(threadIdx.x < 16 ? ALL_LANES : 0xffff0001u, 1);
}

KERNEL void __launch_bounds__(32) mask_without_itself(u32* out) {
    out[threadIdx.x] = __ballot_sync(0x7fffffffu, 1);
}

KERNEL void __launch_bounds__(32) lane_that_ended(u32* out) {
    if (threadIdx.x == 31) return;
    out[threadIdx.x] = warp_sum(1u);
}

KERNEL void __launch_bounds__(16) lane_that_does_not_exist(u32* out) {
    out[threadIdx.x] = __ballot_sync(ALL_LANES, 1);
}

// A word that nobody writes.
KERNEL void __launch_bounds__(32) endless(u64* word) {
    while (load_relaxed(word) == 0) pause();
}

// One lane is kept from the ballot for ever.
KERNEL void __launch_bounds__(32) endless_beside_a_ballot(u64* word) {
    if (threadIdx.x == 3)
        while (load_relaxed(word) == 0) pause();
    __syncwarp();
}

KERNEL void __launch_bounds__(32) writes_behind(u32* out, u64 n) {
    for (u64 i = threadIdx.x; i <= n; i += 32) out[i] = 1;
}

// What shared memory holds before it is written.
KERNEL void __launch_bounds__(32) first_read(u32* out) {
    SHARED(u32, word);
    out[threadIdx.x] = word;
}
