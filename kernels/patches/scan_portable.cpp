// The loops over elements in plain C++.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hash.hpp"

#pragma GCC diagnostic ignored "-Wpsabi"  // all functions with vectors are local

namespace sparsecomm {
namespace patches {
namespace portable {

typedef uint64_t V __attribute__((vector_size(64)));

template <unsigned PLANES>
inline void planes(const uint8_t* label, uint64_t* plane) {
    uint64_t words[PLANES] = {};
    for (unsigned i = 0; i < 64; i += 8) {
        uint64_t bytes;
        std::memcpy(&bytes, label + i, 8);
        for (unsigned k = 0; k < PLANES; k++)
            words[k] |= ((bytes >> k & 0x0101010101010101) * 0x0102040810204080 >> 56) << i;
    }
    for (unsigned k = 0; k < PLANES; k++) plane[8 * k] = words[k];
}

template <class Words>  // one or several
inline void count_in_bytes(Words& words) {
    words -= words >> 1 & 0x5555555555555555;
    words = (words & 0x3333333333333333) + (words >> 2 & 0x3333333333333333);
    words = (words + (words >> 4)) & 0x0f0f0f0f0f0f0f0f;
}

inline unsigned popcount(uint64_t word) {
    count_in_bytes(word);
    return unsigned(word * 0x0101010101010101 >> 56);
}

typedef uint64_t Counts __attribute__((vector_size(16)));
inline Counts counts(V bits) {
    count_in_bytes(bits);
    Counts quarter[4];
    std::memcpy(quarter, &bits, sizeof bits);
    Counts sum = quarter[0] + quarter[1] + quarter[2] + quarter[3];
    sum = (sum & 0x00ff00ff00ff00ff) + (sum >> 8 & 0x00ff00ff00ff00ff);
    sum += sum >> 16;
    return (sum + (sum >> 32)) & 0xffff;
}

inline uint64_t hash_block(const uint8_t* block) {
    uint64_t hash = 0;
    for (size_t j = 0; j < BLOCK / 8; j++) {
        uint64_t word;
        std::memcpy(&word, block + 8 * j, 8);
        hash += hash_word(word, j);
    }
    return hash;
}

inline unsigned select(uint64_t mask, unsigned r) {
    while (r--) mask &= mask - 1;
    return unsigned(__builtin_ctzll(mask));
}

#include "scan_words.inl"
#include "scan.inl"

}  // namespace portable

const Scan portable_scan = portable::table("portable");

}  // namespace patches
}  // namespace sparsecomm
