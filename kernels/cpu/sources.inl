// Where elements come from: a vector (Plain, Held), or a decaying residual and a vector that is added to it (Fused). Included inside
// the namespace of each instruction set.

// How far ahead one stream is asked for, in bytes; hardware stops at the ends of pages. The streams of a fused pass are not
// asked for: from memory that was no faster, and from the cache slower. Measured on Zen 4.
constexpr size_t PLAIN_AHEAD = 8192;

template <class BitsT>
struct Plain {
    using Bits = BitsT;
    const Bits* x;
    Plain(const void* x_, void*, double = 1) : x(static_cast<const Bits*>(x_)) {}
    Bits peek(size_t i) const { return x[i]; }        // the element's bits
    Bits accumulate(size_t i) const { return x[i]; }  // the same, stored where it is to stay
    Bits take(size_t i) const { return x[i]; }        // the same, when it leaves as an entry
    const Bits* stored(size_t i) const { return x + i; }
    void touch(size_t i) const { __builtin_prefetch(x + i); }
    void prefetch(size_t i) const {
        const char* ahead = reinterpret_cast<const char*>(x + i) + PLAIN_AHEAD;
        for (size_t b = 0; b < 64 * sizeof(Bits); b += 64) __builtin_prefetch(ahead + b);
    }
};

// A vector whose entries leave it: zeros stay.
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
