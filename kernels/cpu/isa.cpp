#include "isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>
#include <initializer_list>

namespace sparsecomm {

namespace {

#if defined(__x86_64__)
bool has_f16c() {  // a name that not every compiler's __builtin_cpu_supports knows
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const Isa* named(const char* name) {
    if (!std::strcmp(name, "portable")) return &portable_isa;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && has_f16c())
        return &avx2_isa;
    if (!std::strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2"))
        return &avx512_isa;
#endif
    return nullptr;
}

const Isa* best() {
    for (const char* name : {"avx512", "avx2"})
        if (const Isa* isa = named(name)) return isa;
    return &portable_isa;
}

std::atomic<const Isa*>& chosen() {
    static std::atomic<const Isa*> isa{best()};
    return isa;
}

}  // namespace

const Isa& isa() { return *chosen().load(std::memory_order_relaxed); }

bool use_isa(const char* name) {
    const Isa* isa = named(name);
    if (isa) chosen().store(isa, std::memory_order_relaxed);
    return isa != nullptr;
}

}  // namespace sparsecomm
