// Sources of elements: a vector (Plain, Held), or a residual that decays and to which a vector is added (Fused). Included
// inside the namespace of each instruction set.

// Distance in bytes at which a single stream is prefetched, because hardware prefetching stops at page ends. Prefetching the
// streams of a fused pass was not faster from memory and slower from the cache. Measured on Zen 4.
constexpr size_t PLAIN_AHEAD = 8192;

template <class BitsT>
struct Plain {
    using Bits = BitsT;
    const Bits* x;
    Plain(const void* x_, void*, double = 1) : x(static_cast<const Bits*>(x_)) {}
    Bits peek(size_t i) const { return x[i]; }        // returns the element's bits
    Bits accumulate(size_t i) const { return x[i]; }  // also stores them in the residual, if there is one
    Bits take(size_t i) const { return x[i]; }        // returns the bits of an entry; Held and Fused then store 0
    const Bits* stored(size_t i) const { return x + i; }
    void touch(size_t i) const { __builtin_prefetch(x + i); }
    void prefetch(size_t i) const {
        const char* ahead = reinterpret_cast<const char*>(x + i) + PLAIN_AHEAD;
        for (size_t b = 0; b < 64 * sizeof(Bits); b += 64) __builtin_prefetch(ahead + b);
    }
};

// A vector in which entries that are taken become 0.
template <class BitsT>
struct Held : Plain<BitsT> {
    using Bits = BitsT;
    Bits* r;
    Held(const void* x_, void* r_, double = 1) : Plain<Bits>(x_, nullptr), r(static_cast<Bits*>(r_)) {}
    Bits take(size_t i) const {
        const Bits bits = r[i];
        r[i] = 0;
        return bits;
    }
};

template <class X, class R>
struct Fused {
    using Bits = typename R::Bits;
    using XBits = typename X::Bits;
    using Accumulator = typename R::Accumulator;
    const XBits* x;
    Bits* r;
    Accumulator decay;
    Fused(const void* x_, void* r_, double decay_ = 1)
        : x(static_cast<const XBits*>(x_)), r(static_cast<Bits*>(r_)), decay(Accumulator(decay_)) {}
    Bits peek(size_t i) const { return R::narrow(decay * R::widen(r[i]) + X::widen(x[i])); }
    Bits accumulate(size_t i) const { return r[i] = peek(i); }
    Bits take(size_t i) const {
        const Bits bits = r[i];
        r[i] = 0;
        return bits;
    }
    const Bits* stored(size_t i) const { return r + i; }
    void touch(size_t i) const {
        __builtin_prefetch(x + i);
        __builtin_prefetch(r + i);
    }
    void prefetch(size_t) const {}
};
