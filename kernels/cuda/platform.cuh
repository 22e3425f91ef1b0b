// The machine-dependent part of the kernels: memory order, shared memory, 16-byte accesses.
//
// Names in capitals that no source declares are macros that sparsecomm/backends/cuda/modules.py defines: types (FORMAT, ACC,
// INDEX, CODEC ...), sizes (FILTER_THREADS, BINS ...), and the sizes of structures in device memory (SELECTION_BYTES ...).
//
// The tests run these sources on the CPU, with one fiber per CUDA thread: SPARSECOMM_EMULATED is then the name of a header
// that replaces the compiler's built-ins.
#pragma once

#ifdef SPARSECOMM_EMULATED
#include SPARSECOMM_EMULATED
#endif

#include "formats.hpp"

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")  // keeps arrays in registers, which need constant indices
#define OWN_LINE alignas(128)     // keeps contended counters in separate lines of the L2

namespace sparsecomm {

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef SPARSECOMM_EMULATED

// Declares uninitialized shared memory.
#define SHARED(T, name) __shared__ T name

// Accesses a word that other blocks wait for, with relaxed order: it publishes no other memory.
DEVICE u64 load_relaxed(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// Loads a counter with acquire order: writes before its release are then visible.
DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Waits briefly between two loads of a word that another block will write.
DEVICE void pause() { __nanosleep(32); }

#endif

// Sixteen bytes, loaded and stored by one instruction.
struct alignas(16) Vector {
    u32 word[4];
};

}  // namespace sparsecomm
