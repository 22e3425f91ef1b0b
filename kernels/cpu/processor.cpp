#include "processor.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstring>

namespace sparsecomm {

namespace {

#if defined(__x86_64__)
// Uses CPUID, because __builtin_cpu_supports differs between compilers, and is always false with some.
struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    explicit Leaf(unsigned number) {
        if (!__get_cpuid_count(number, 0, &eax, &ebx, &ecx, &edx)) eax = ebx = ecx = edx = 0;
    }
};

bool has(unsigned set, unsigned bits) { return (set & bits) == bits; }

// Returns whether the system saves these registers when it switches threads.
bool saves(unsigned state) {
    if (!has(Leaf(1).ecx, bit_OSXSAVE)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return has(low, state);
}

bool has_avx2() {
    constexpr unsigned ymm = 0x6;  // XMM and the upper halves of YMM
    return saves(ymm) && has(Leaf(1).ecx, bit_AVX | bit_F16C | bit_POPCNT) &&
           has(Leaf(7).ebx, bit_AVX2 | bit_BMI | bit_BMI2);
}

bool has_avx512() {
    constexpr unsigned zmm = 0xe6;  // the state of YMM, the masks, and all of ZMM
    return saves(zmm) && has_avx2() &&
           has(Leaf(7).ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
}
#endif

}  // namespace

bool supports(const char* name) {
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx2")) return has_avx2();
    if (!std::strcmp(name, "avx512")) return has_avx512();
    if (!std::strcmp(name, "avx512_vpopcntdq")) return has_avx512() && has(Leaf(7).ecx, bit_AVX512VPOPCNTDQ);
#endif
    return !std::strcmp(name, "portable");
}

}  // namespace sparsecomm
