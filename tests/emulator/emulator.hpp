// CUDA on the CPU: stands in for the compiler's built-ins, so that the kernels' own sources run without a GPU.
//
// Every CUDA thread is a fiber, which scheduler.cpp runs. This header is compiled with each module of kernels and each
// type, so it includes as little as possible.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace emulator {

struct Index {
    unsigned x, y = 0, z = 0;
};

constexpr int LANES = 32;

enum class State { ready, barrier, warp, spinning, done };

// Where the running fiber is, and the numbers of threads per block and of blocks. `__thread` needs no initialization.
struct Position {
    const Index *thread, *block;
    Index threads, blocks;
};
extern __thread Position position;

// -- scheduler.cpp -----------------------------------------------------------------------------------------------

uint64_t random();
void made_progress();  // waits begin to count anew: see PATIENCE
// End the launch with an error.
[[noreturn]] void fail(const char* text);
// Return to the scheduler, which resumes the fiber once it is ready.
void wait_as(State state);
void spin();  // wait in a polling loop
// A warp operation. For "a shuffle", return the value that lane `source` has given; otherwise, return a mask of the lanes
// whose values are odd.
uint64_t warp(const char* operation, unsigned mask, uint64_t given, unsigned source = 0);
// Return the running block's copy of a variable in shared memory.
void* shared_memory(const void* declaration, size_t nbytes, size_t alignment);
// Run `body(arguments)` in each thread; return 0, or 1 with a text in `error` for a fault that a GPU
// would not report.
int launch(void (*body)(void*), void* arguments, unsigned grid, unsigned block, unsigned resident, uint64_t seed, char* error,
           size_t room);

// -- templates -----------------------------------------------------------------------------------------------------

template <class T>
T shuffled(unsigned mask, T v, unsigned source) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &v, sizeof v);
    bits = warp("a shuffle", mask, bits, source);
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

inline unsigned lane() { return position.thread->x % LANES; }

template <class... A>
struct Launch {
    void (*kernel)(A...);
    void** arguments;
    static void body(void* self) { call(static_cast<Launch*>(self), std::index_sequence_for<A...>()); }
    template <size_t... I>
    static void call(Launch* launch, std::index_sequence<I...>) {
        launch->kernel(*static_cast<A*>(launch->arguments[I])...);
    }
};

template <class... A>
int launch(void (*kernel)(A...), unsigned grid, unsigned block, unsigned resident, uint64_t seed, void** arguments,
           char* error, size_t room) {
    Launch<A...> it{kernel, arguments};
    return launch(&Launch<A...>::body, &it, grid, block, resident, seed, error, room);
}

// The sizes of a kernel's parameters; 0 ends them.
template <class... A>
void sizes(void (*)(A...), unsigned* out) {
    for (const size_t size : {sizeof(A)...}) *out++ = unsigned(size);
    *out = 0;
}

}  // namespace emulator

// -- CUDA's names ------------------------------------------------------------------------------------------------

#define SHARED(T, name)               \
    static char name##_declared_here; \
    T& name = *static_cast<T*>(emulator::shared_memory(&name##_declared_here, sizeof(T), alignof(T)))

#define threadIdx (*emulator::position.thread)
#define blockIdx (*emulator::position.block)
#define blockDim (emulator::position.threads)
#define gridDim (emulator::position.blocks)

inline void __syncthreads() { emulator::wait_as(emulator::State::barrier); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::warp("__syncwarp", mask, 0); }
inline void __threadfence() {}
inline unsigned __ballot_sync(unsigned mask, int p) { return unsigned(emulator::warp("a ballot", mask, p != 0)); }
inline int __any_sync(unsigned mask, int p) { return emulator::warp("any", mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return unsigned(emulator::warp("all", mask, p != 0)) == mask; }
template <class T>
T __shfl_sync(unsigned mask, T v, int source) {
    return emulator::shuffled(mask, v, unsigned(source));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by) {
    const unsigned lane = emulator::lane();
    return emulator::shuffled(mask, v, lane < by ? lane : lane - by);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by) {
    const unsigned lane = emulator::lane();
    return emulator::shuffled(mask, v, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, unsigned with) {
    return emulator::shuffled(mask, v, emulator::lane() ^ with);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
    unsigned equal = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) equal |= unsigned(emulator::shuffled(mask, v, lane) == v) << lane;
    return equal;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }

template <class T>
T atomicAdd(T* p, T v) {
    emulator::made_progress();
    if (emulator::random() % 16 == 0) emulator::wait_as(emulator::State::ready);
    const T old = *p;
    *p = old + v;
    return old;
}

namespace sparsecomm {

inline unsigned long long load_relaxed(const unsigned long long* p) {
    emulator::wait_as(emulator::State::ready);
    return *static_cast<const volatile unsigned long long*>(p);
}
inline void store_relaxed(unsigned long long* p, unsigned long long v) {
    *static_cast<volatile unsigned long long*>(p) = v;
    emulator::made_progress();
    emulator::wait_as(emulator::State::ready);
}
inline unsigned load_acquire(const unsigned* p) { return *static_cast<const volatile unsigned*>(p); }
inline void pause() { emulator::spin(); }

}  // namespace sparsecomm
