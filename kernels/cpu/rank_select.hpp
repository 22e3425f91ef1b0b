// The r-th largest of a list of magnitudes: time linear in the list whatever is in it, and near the time to read it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../formats.hpp"
#include "isa.hpp"

namespace sparsecomm {

template <class Bits>
struct Kth {
    Bits key;     // the r-th largest
    size_t ties;  // how many of those equal to it are among the r largest, at least 1
};

namespace rank_select {

constexpr size_t SAMPLE = 512;           // keys looked at to bracket the answer
constexpr size_t BRACKET_FROM = 1 << 13;  // keys from which that pays
constexpr size_t SORT_UP_TO = 64;
constexpr unsigned DIGIT = 11;           // bits of one radix pass

// Keys of [low, high) hold the answer; `larger` keys are at or above high.
template <class Bits>
struct Bracket {
    Bits low, high;
    size_t larger;
};

// Where a sample says that the answer is, corrected by counting.
template <class Bits>
Bracket<Bits> by_sample(const Bits* keys, size_t count, size_t rank, const Select<Bits>& loops) {
    Bits sample[SAMPLE];
    for (size_t i = 0; i < SAMPLE; i++) sample[i] = keys[count / SAMPLE * i];
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
    const size_t above_high = high == beyond ? 0 : loops.reaching(keys, count, high);
    if (rank <= above_high) return {high, beyond, 0};
    const size_t above_low = loops.reaching(keys, count, low);
    if (rank <= above_low) return {low, high, above_high};
    return {0, low, above_low};
}

// The bin of a histogram over the bits in which keys differ.
template <class Bits>
Bracket<Bits> by_digit(const Bits* keys, size_t count, size_t rank, unsigned shift, Bits common) {
    uint32_t histogram[2][1u << DIGIT] = {};
    constexpr size_t last = (1u << DIGIT) - 1;
    size_t i = 0;
    for (; i + 2 <= count; i += 2) {  // two histograms: equal keys in a row must not wait for each other
        histogram[0][(uint64_t(keys[i]) >> shift) & last]++;
        histogram[1][(uint64_t(keys[i + 1]) >> shift) & last]++;
    }
    if (i < count) histogram[0][(uint64_t(keys[i]) >> shift) & last]++;
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

// 1 <= rank <= count. The list is used up, and there is room for 16 more behind it.
template <class Bits>
Kth<Bits> kth_largest(Bits* keys, size_t count, size_t rank, const Select<Bits>& loops) {
    using namespace rank_select;
    bool trusting = true;  // the last sample was worth it
    while (count > SORT_UP_TO) {
        Bracket<Bits> bracket;
        if (trusting && count >= BRACKET_FROM) {
            bracket = by_sample(keys, count, rank, loops);
        } else {
            Bits any = 0, all = Bits(~Bits(0));
            for (size_t i = 0; i < count; i++) any |= keys[i], all &= keys[i];
            if (any == all) return {any, rank};
            const unsigned width = 64u - unsigned(__builtin_clzll(uint64_t(any ^ all)));
            const unsigned shift = width > DIGIT ? width - DIGIT : 0;
            const Bits differing = Bits((uint64_t(1) << width) - 1);
            bracket = by_digit(keys, count, rank, shift, Bits(all & ~differing));
            if (shift == 0) return {bracket.low, rank - bracket.larger};
        }
        const size_t kept = loops.between(keys, count, bracket.low, bracket.high, keys);
        trusting = kept < count / 2;
        rank -= bracket.larger;
        count = kept;
    }
    std::sort(keys, keys + count);
    const Bits key = keys[count - rank];
    size_t larger = 0;
    while (larger < rank && keys[count - 1 - larger] > key) larger++;
    return {key, rank - larger};
}

}  // namespace sparsecomm
