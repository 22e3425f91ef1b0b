// Finds the r-th largest of a list of magnitudes in linear time, close to the time of reading the list.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../formats.hpp"
#include "isa.hpp"

namespace sparsecomm {

namespace rank_select {

constexpr size_t SAMPLE = 512;            // magnitudes sampled to bracket the answer
constexpr size_t BRACKET_FROM = 1 << 13;  // minimum magnitudes for which sampling pays
constexpr size_t COUNT_UP_TO = 1 << 14;   // maximum bytes for which counting is cheapest
constexpr unsigned DIGIT = 11;            // bits of one radix pass

// The answer is in [low, high); `larger` magnitudes are at or above high.
template <class Bits>
struct Bracket {
    Bits low, high;
    size_t larger;
};

// Brackets the answer with a sample, corrected by counting.
template <class Bits>
Bracket<Bits> by_sample(const Bits* bits, size_t count, size_t rank, const Select<Bits>& loops) {
    Bits sample[SAMPLE];
    for (size_t i = 0; i < SAMPLE; i++) sample[i] = magnitude(bits[count / SAMPLE * i]);
    const double fraction = double(rank) / double(count), expected = fraction * SAMPLE;
    const double spread = 3 * std::sqrt(expected * (1 - fraction)) + 3;
    const auto from_top = [&](double position) {
        auto* nth = sample + size_t(position);
        std::nth_element(sample, nth, sample + SAMPLE, [](Bits a, Bits b) { return a > b; });
        return *nth;
    };
    constexpr Bits beyond = Bits(magnitude_mask<Bits> + 1);
    const Bits high = expected > spread ? from_top(expected - spread) : beyond;
    const Bits low = expected + spread < SAMPLE ? from_top(expected + spread) : Bits(0);
    const size_t reach_high = high == beyond ? 0 : loops.reaching(bits, count, high);
    if (rank <= reach_high) return {high, beyond, 0};
    const size_t reach_low = loops.reaching(bits, count, low);
    if (rank <= reach_low) return {low, high, reach_high};
    return {0, low, reach_low};
}

// Brackets the answer with a bin of a histogram. The bins divide the bits in which the magnitudes differ. If the bin contains
// one magnitude, `Bracket::low` is the answer.
template <class Bits>
Bracket<Bits> by_digit(const Bits* bits, size_t count, size_t rank) {
    Bits any = 0, all = magnitude_mask<Bits>;
    for (size_t i = 0; i < count; i++) any |= magnitude(bits[i]), all &= bits[i];
    if (any == all) return {any, Bits(any + 1), 0};
    const unsigned width = 64u - unsigned(__builtin_clzll(uint64_t(any ^ all)));
    const unsigned shift = width > DIGIT ? width - DIGIT : 0;
    const Bits differing = Bits((uint64_t(1) << width) - 1), common = Bits(all & ~differing);
    uint32_t histogram[2][1u << DIGIT] = {};
    constexpr size_t last = (1u << DIGIT) - 1;
    size_t i = 0;
    const auto bin_of = [&](Bits b) { return (uint64_t(magnitude(b)) >> shift) & last; };
    for (; i + 2 <= count; i += 2) {  // two histograms, so that equal consecutive keys do not wait for each other
        histogram[0][bin_of(bits[i])]++;
        histogram[1][bin_of(bits[i + 1])]++;
    }
    if (i < count) histogram[0][bin_of(bits[i])]++;
    size_t larger = 0;
    for (size_t bin = last;; bin--) {
        const size_t size = size_t(histogram[0][bin]) + histogram[1][bin];
        if (rank <= larger + size) {
            const Bits low = Bits(common | Bits(uint64_t(bin) << shift));
            return {low, Bits(low + Bits(uint64_t(1) << shift)), larger};
        }
        larger += size;
    }
}

}  // namespace rank_select

// Works on keys, as returned by `key_of`. 1 <= rank <= count. `room` has count + 16 elements and may be the bits.
template <class Bits>
Kth<Bits> kth_largest(const Bits* bits, size_t count, size_t rank, Bits infinity, Bits* room, const Select<Bits>& loops) {
    using namespace rank_select;
    const auto key_of_kth = [&, wanted = rank](Bits key, size_t ties) {  // all NaN are equal
        return key > infinity ? Kth<Bits>{Bits(infinity + 1), wanted} : Kth<Bits>{key, ties};
    };
    bool trusting = true;  // the last sample helped
    while (count * sizeof(Bits) > COUNT_UP_TO) {
        const bool sampled = trusting && count >= BRACKET_FROM;
        const Bracket<Bits> b = sampled ? by_sample(bits, count, rank, loops) : by_digit(bits, count, rank);
        rank -= b.larger;
        if (b.high - b.low == 1) return key_of_kth(b.low, rank);
        const size_t kept = loops.between(bits, count, b.low, b.high, room);
        trusting = kept < count / 2;
        count = kept;
        bits = room;
    }
    const Kth<Bits> kth = loops.by_counting(bits, count, rank, room);
    return key_of_kth(kth.key, kth.ties);
}

}  // namespace sparsecomm
