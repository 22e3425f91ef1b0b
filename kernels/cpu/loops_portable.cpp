// The inner loops in plain C++, for every processor. They define the meaning of the primitives.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../formats.hpp"
#include "isa.hpp"

namespace sparsecomm {
namespace portable {

#include "sources.inl"
#include "scalar.inl"

// Finds elements i .. i+63 with magnitude >= threshold. First tests whether there is one, in a loop that vectorizes well.
template <class S>
inline uint64_t block(const S& s, size_t i, typename S::Bits threshold) {
    using Bits = typename S::Bits;
    Bits largest = 0;
    for (size_t j = 0; j < 64; j++) {
        const Bits m = magnitude(s.accumulate(i + j));
        largest = m > largest ? m : largest;
    }
    if (largest < threshold) return 0;
    const Bits* stored = s.stored(i);
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j++) mask |= uint64_t(magnitude(stored[j]) >= threshold) << j;
    return mask;
}

inline size_t append_positions(uint64_t mask, uint32_t local, uint32_t* index, size_t o) {
    for (; mask; mask &= mask - 1) index[o++] = local + uint32_t(__builtin_ctzll(mask));
    return o;
}

template <class Format>
inline void widen_block(Format, const uint16_t* bits, float* values) {
    for (size_t j = 0; j < 64; j++) values[j] = Format::widen(bits[j]);
}
template <class Format>
inline void narrow_block(Format, const float* values, uint16_t* bits) {
    for (size_t j = 0; j < 64; j++) bits[j] = Format::narrow(values[j]);
}

inline uint64_t signs(const float* values) {
    uint64_t bits = 0;
    for (size_t j = 0; j < 64; j++) bits |= uint64_t(bit_cast<uint32_t>(values[j]) >> 31) << j;
    return bits;
}
inline void spread(uint64_t bits, uint32_t* all_or_none) {
    for (size_t j = 0; j < 64; j++) all_or_none[j] = 0u - uint32_t(bits >> j & 1);
}

#include "indices.inl"
#include "values.inl"
#include "few_bits.inl"
#include "loops.inl"

}  // namespace portable

const Isa portable_isa = portable::table("portable");

}  // namespace sparsecomm
