// The loops over elements for AVX2 and BMI2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../cpu/target.hpp"
#include "hash.hpp"

#pragma GCC diagnostic ignored "-Wpsabi"  // all functions with vectors are local

SPARSECOMM_TARGET_BEGIN("avx2,bmi,bmi2,popcnt")
namespace sparsecomm {
namespace patches {
namespace avx2 {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

typedef uint64_t V __attribute__((vector_size(64)));

template <unsigned PLANES>
inline void planes(const uint8_t* label, uint64_t* plane) {
    __m256i low = _mm256_slli_epi16(load(label), 8 - PLANES), high = _mm256_slli_epi16(load(label + 32), 8 - PLANES);
    for (unsigned k = PLANES; k--;) {
        plane[8 * k] = uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32 | uint32_t(_mm256_movemask_epi8(low));
        low = _mm256_add_epi8(low, low), high = _mm256_add_epi8(high, high);
    }
}

inline unsigned popcount(uint64_t word) { return unsigned(_mm_popcnt_u64(word)); }

typedef uint64_t Counts __attribute__((vector_size(32)));
inline __m256i bits_of_bytes(__m256i bytes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i nibble = _mm256_set1_epi8(15);
    return _mm256_add_epi8(_mm256_shuffle_epi8(table, _mm256_and_si256(bytes, nibble)),
                           _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)));
}
inline Counts counts(const V& bits) {
    const auto* half = reinterpret_cast<const __m256i*>(&bits);
    return Counts(_mm256_sad_epu8(_mm256_add_epi8(bits_of_bytes(half[0]), bits_of_bytes(half[1])), _mm256_setzero_si256()));
}

inline uint64_t hash_block(const uint8_t* block) {
    __m256i sum = _mm256_setzero_si256(), swapped = _mm256_setzero_si256();
    for (size_t j = 0; j < BLOCK / 8; j += 4) {
        const __m256i word = load(block + 8 * j), keyed = _mm256_xor_si256(word, load(KEYS.of + j));
        sum = _mm256_add_epi64(sum, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
        swapped = _mm256_add_epi64(swapped, _mm256_shuffle_epi32(word, 0xb1));
    }
    alignas(32) uint64_t lane[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), _mm256_add_epi64(sum, swapped));
    return lane[0] + lane[1] + lane[2] + lane[3];
}

inline unsigned select(uint64_t mask, unsigned r) { return unsigned(_tzcnt_u64(_pdep_u64(uint64_t(1) << r, mask))); }

#include "scan_words.inl"
#include "scan.inl"

}  // namespace avx2

const Scan avx2_scan = avx2::table("avx2");

}  // namespace patches
}  // namespace sparsecomm
SPARSECOMM_TARGET_END
#endif
