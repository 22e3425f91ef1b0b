// What the kernels ask of the machine, and nothing else does: memory order, shared memory, 16 bytes at a time.
//
// Names in capitals that no source declares are macros that sparsecomm/backends/cuda/modules.py defines: types (FORMAT, ACC,
// INDEX, CODEC ...), sizes (FILTER_THREADS, BINS ...), and the bytes of structures in device memory (SELECTION_BYTES ...).
//
// The tests run these sources on the CPU, with one fiber per CUDA thread: SPARSECOMM_EMULATED then names a header that
// stands in for the compiler's built-ins.
#pragma once

#ifdef SPARSECOMM_EMULATED
#include SPARSECOMM_EMULATED
#endif

#include "formats.hpp"

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")  // arrays that are to be registers need constant indices
#define OWN_LINE alignas(128)     // counters that many blocks add to, apart from each other in the L2

namespace sparsecomm {

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef SPARSECOMM_EMULATED

// Declares shared memory, not initialised.
#define SHARED(T, name) __shared__ T name

// A word that other blocks wait for, at relaxed order: no other memory is published by it.
DEVICE u64 load_relaxed(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// A counter, at acquire order: who sees it sees what was written before it was released.
DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Waits a little, between two loads of a word that another block will write.
DEVICE void pause() { __nanosleep(32); }

#endif

// Sixteen bytes, loaded and stored by one instruction.
struct alignas(16) Vector {
    u32 word[4];
};

}  // namespace sparsecomm
