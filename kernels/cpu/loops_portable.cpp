// The inner loops in plain C++: what every processor runs, and the meaning of the primitives.
#include "formats.hpp"
#include "isa.hpp"

namespace sparsecomm {
namespace portable {

#include "sources.inl"

// Elements i .. i+63 with magnitude >= edge. First only whether there is one: that loop vectorises everywhere.
template <class S>
inline uint64_t block(const S& s, size_t i, typename S::Bits edge) {
    using Bits = typename S::Bits;
    Bits largest = 0;
    for (size_t j = 0; j < 64; j++) {
        const Bits m = magnitude(s.accumulate(i + j));
        largest = m > largest ? m : largest;
    }
    if (largest < edge) return 0;
    const Bits* stored = s.stored(i);
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j++) mask |= uint64_t(magnitude(stored[j]) >= edge) << j;
    return mask;
}

template <class S>
inline size_t append_few(const S&, size_t, uint64_t, size_t, uint32_t*, typename S::Bits*, size_t);

template <class S>
inline size_t append(const S& s, size_t i, uint64_t mask, size_t local, uint32_t* index, typename S::Bits* bits,
                     size_t o) {
    return append_few(s, i, mask, local, index, bits, o);
}

// Whole vectors of entries, where the set has vectors; return how many entries were done.
template <class Bits>
inline size_t between_blocks(const Bits*, size_t, Bits, Bits, Bits*, size_t*) { return 0; }
template <class Bits>
inline size_t reaching_blocks(const Bits*, size_t, Bits, size_t*) { return 0; }

template <class Bits>
inline size_t split_blocks(const uint32_t*, const Bits*, size_t, Limit<Bits>&, const Kept<Bits>&, uint32_t*, Bits*,
                           size_t*, size_t*) {
    return 0;
}

#include "loops.inl"

}  // namespace portable

const Isa portable_isa = portable::table("portable");

}  // namespace sparsecomm
