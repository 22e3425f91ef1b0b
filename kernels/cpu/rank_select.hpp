// The r-th largest of a list of keys, by radix: time linear in the list whatever is in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sparsecomm {

template <class Bits>
struct Kth {
    Bits key;     // the r-th largest
    size_t ties;  // how many of the keys equal to it are among the r largest, at least 1
};

// 1 <= rank <= count. The list is used up.
template <class Bits>
Kth<Bits> kth_largest(Bits* keys, size_t count, size_t rank) {
    constexpr unsigned DIGIT = 11;
    uint32_t histogram[2][1u << DIGIT];
    for (;;) {
        if (count <= 48) {
            std::sort(keys, keys + count);
            const Bits key = keys[count - rank];
            size_t larger = 0;
            while (larger < rank && keys[count - 1 - larger] > key) larger++;
            return {key, rank - larger};
        }
        Bits low = keys[0], high = keys[0];
        for (size_t i = 1; i < count; i++) {
            low = keys[i] < low ? keys[i] : low;
            high = keys[i] > high ? keys[i] : high;
        }
        if (low == high) return {low, rank};
        const unsigned width = 64u - unsigned(__builtin_clzll(uint64_t(high - low)));
        const unsigned shift = width > DIGIT ? width - DIGIT : 0;
        const size_t bins = (size_t(Bits(high - low)) >> shift) + 1;
        std::fill_n(histogram[0], bins, 0u);
        std::fill_n(histogram[1], bins, 0u);
        size_t i = 0;
        for (; i + 2 <= count; i += 2) {  // two histograms: equal keys in a row must not wait for each other
            histogram[0][size_t(Bits(keys[i] - low)) >> shift]++;
            histogram[1][size_t(Bits(keys[i + 1] - low)) >> shift]++;
        }
        if (i < count) histogram[0][size_t(Bits(keys[i] - low)) >> shift]++;
        size_t bin = bins - 1, size = 0;
        for (;; bin--) {
            size = size_t(histogram[0][bin]) + histogram[1][bin];
            if (rank <= size) break;
            rank -= size;
        }
        if (shift == 0) return {Bits(low + Bits(bin)), rank};
        size_t kept = 0;
        for (size_t j = 0; j < count; j++) {
            const Bits key = keys[j];
            keys[kept] = key;
            kept += (size_t(Bits(key - low)) >> shift) == bin;
        }
        count = kept;
    }
}

}  // namespace sparsecomm
