// The mode in which the processor rounds and handles denormals. Each thread has its own, and programs change it: for
// example torch.set_flush_denormal, libraries linked with fast math, and XLA in its threads.
#pragma once

#include <cstdint>

namespace sparsecomm {

// Sets the default mode of its thread during its lifetime: round to nearest even, with denormals, without traps. If the mode
// is already set, this costs one read.
class DefaultFloatMode {
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word FLAGS = 0x3f, DEFAULT = 0x1f80;  // FLAGS are exception flags, not part of the mode
    static Word get() {
        Word word;
        asm volatile("stmxcsr %0" : "=m"(word) : : "memory");
        return word;
    }
    static void set(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word FLAGS = 0, DEFAULT = 0;
    static Word get() {
        Word word;
        asm volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
        return word;
    }
    static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
    using Word = uint32_t;
    static constexpr Word FLAGS = 0, DEFAULT = 0;
    static Word get() { return 0; }
    static void set(Word) {}
#endif

    const Word before_;
    const bool differs_;

  public:
    DefaultFloatMode() : before_(get()), differs_((before_ & ~FLAGS) != DEFAULT) {
        if (differs_) set(DEFAULT);
    }
    ~DefaultFloatMode() {
        if (differs_) set(before_);
    }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

// Calls F, which the compiler cannot inline, in the default mode.
template <auto F, class... Arguments>
auto in_default_mode(Arguments&&... arguments) {
    const DefaultFloatMode mode;
    return F(static_cast<Arguments&&>(arguments)...);
}

}  // namespace sparsecomm
