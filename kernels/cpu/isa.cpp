#include "isa.hpp"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "processor.hpp"

namespace sparsecomm {

namespace {

const Isa* named(const char* name) {
    if (!supports(name)) return nullptr;
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx2")) return &avx2_isa;
    if (!std::strcmp(name, "avx512")) return &avx512_isa;
#endif
    return &portable_isa;
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
