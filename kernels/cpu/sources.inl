// Where elements come from: a vector (Plain), or a residual and a vector that is added to it (Fused). Included inside
// the namespace of each instruction set.

template <class BitsT>
struct Plain {
    using Bits = BitsT;
    const Bits* x;
    Plain(const void* x_, void*) : x(static_cast<const Bits*>(x_)) {}
    Bits peek(size_t i) const { return x[i]; }        // the element's bits
    Bits accumulate(size_t i) const { return x[i]; }  // the same, stored where it is to stay
    Bits take(size_t i) const { return x[i]; }        // the same, when it leaves as an entry
    const Bits* stored(size_t i) const { return x + i; }
    void prefetch(size_t i, size_t ahead) const {
        const char* p = reinterpret_cast<const char*>(x + i) + ahead;
        for (size_t b = 0; b < 64 * sizeof(Bits); b += 64) __builtin_prefetch(p + b);
    }
};

template <class X, class R>
struct Fused {
    using Bits = typename R::Bits;
    using XBits = typename X::Bits;
    const XBits* x;
    Bits* r;
    Fused(const void* x_, void* r_) : x(static_cast<const XBits*>(x_)), r(static_cast<Bits*>(r_)) {}
    Bits peek(size_t i) const { return R::narrow(R::widen(r[i]) + X::widen(x[i])); }
    Bits accumulate(size_t i) const { return r[i] = peek(i); }
    Bits take(size_t i) const {
        const Bits bits = r[i];
        r[i] = 0;
        return bits;
    }
    const Bits* stored(size_t i) const { return r + i; }
    void prefetch(size_t i, size_t ahead) const {
        const char* p = reinterpret_cast<const char*>(x + i) + ahead / 2;
        for (size_t b = 0; b < 64 * sizeof(XBits); b += 64) __builtin_prefetch(p + b);
        const char* q = reinterpret_cast<const char*>(r + i) + ahead / 2;
        for (size_t b = 0; b < 64 * sizeof(Bits); b += 64) __builtin_prefetch(q + b, 1);
    }
};
