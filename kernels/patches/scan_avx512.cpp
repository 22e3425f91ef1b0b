// The loops over elements for AVX-512 (F, BW, VL, DQ, VPOPCNTDQ).
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the headers of GCC 12
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../cpu/target.hpp"
#include "hash.hpp"

SPARSECOMM_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vpopcntdq,avx2,bmi,bmi2,popcnt")
namespace sparsecomm {
namespace patches {
namespace avx512 {

typedef uint64_t V __attribute__((vector_size(64)));

template <unsigned PLANES>
inline void planes(const uint8_t* label, uint64_t* plane) {
    const __m512i labels = _mm512_loadu_si512(label);
    for (unsigned k = 0; k < PLANES; k++) plane[8 * k] = _mm512_test_epi8_mask(labels, _mm512_set1_epi8(char(1 << k)));
}

typedef V Counts;
inline Counts counts(V bits) { return V(_mm512_popcnt_epi64(__m512i(bits))); }

inline uint64_t hash_block(const uint8_t* block) {
    __m512i sum = _mm512_setzero_si512(), swapped = _mm512_setzero_si512();
    for (size_t j = 0; j < BLOCK / 8; j += 8) {
        const __m512i word = _mm512_loadu_si512(block + 8 * j), keyed = _mm512_xor_si512(word, _mm512_load_si512(KEYS.of + j));
        sum = _mm512_add_epi64(sum, _mm512_mul_epu32(keyed, _mm512_maskz_srli_epi64(0xff, keyed, 32)));
        swapped = _mm512_add_epi64(swapped, _mm512_maskz_rol_epi64(0xff, word, 32));
    }
    return uint64_t(_mm512_reduce_add_epi64(_mm512_add_epi64(sum, swapped)));
}

inline void add_lanes(const Counts* sums, const uint16_t* before, uint16_t* after) {
    const __m512i s0 = __m512i(sums[0]), s1 = __m512i(sums[1]), s2 = __m512i(sums[2]), s3 = __m512i(sums[3]);
    const __m512i a = _mm512_add_epi64(_mm512_unpacklo_epi64(s0, s1), _mm512_unpackhi_epi64(s0, s1));
    const __m512i b = _mm512_add_epi64(_mm512_unpacklo_epi64(s2, s3), _mm512_unpackhi_epi64(s2, s3));
    const __m512i c = _mm512_add_epi64(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
    const __m512i d = _mm512_add_epi64(_mm512_shuffle_i64x2(c, c, 0x08), _mm512_shuffle_i64x2(c, c, 0x0d));
    const auto* from = reinterpret_cast<const __m256i*>(before);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(after), _mm256_add_epi64(_mm256_loadu_si256(from), _mm512_castsi512_si256(d)));
}

inline size_t find(V bits, unsigned r) {
    const __m512i none = _mm512_setzero_si512(), count = _mm512_popcnt_epi64(__m512i(bits));
    __m512i reached = _mm512_add_epi64(count, _mm512_alignr_epi64(count, none, 7));
    reached = _mm512_add_epi64(reached, _mm512_alignr_epi64(reached, none, 6));
    reached = _mm512_add_epi64(reached, _mm512_alignr_epi64(reached, none, 4));
    const __mmask8 earlier = _mm512_cmple_epu64_mask(reached, _mm512_set1_epi64(r)), at = _kadd_mask8(earlier, 1);
    const __m512i before = _mm512_maskz_compress_epi64(at, _mm512_sub_epi64(reached, count));
    const __m512i word = _mm512_maskz_compress_epi64(at, __m512i(bits));
    const unsigned within = r - unsigned(_mm_cvtsi128_si32(_mm512_castsi512_si128(before)));
    const uint64_t chosen = _pdep_u64(uint64_t(1) << within, uint64_t(_mm_cvtsi128_si64(_mm512_castsi512_si128(word))));
    return 64 * size_t(__builtin_popcount(earlier)) + size_t(_tzcnt_u64(chosen));
}

inline unsigned count_below(V bits, unsigned end) {
    const __m512i begin = _mm512_setr_epi64(0, 64, 128, 192, 256, 320, 384, 448);
    const __m512i width = _mm512_max_epi64(_mm512_sub_epi64(_mm512_set1_epi64(end), begin), _mm512_setzero_si512());
    const __m512i below = _mm512_sub_epi64(_mm512_sllv_epi64(_mm512_set1_epi64(1), width), _mm512_set1_epi64(1));
    return unsigned(_mm512_reduce_add_epi64(_mm512_popcnt_epi64(_mm512_and_si512(__m512i(bits), below))));
}

inline size_t last_up_to(const uint16_t* sorted, unsigned limit) {
    const __m256i numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(sorted));
    return size_t(__builtin_popcount(_mm256_cmple_epu16_mask(numbers, _mm256_set1_epi16(short(limit))))) - 1;
}

#include "scan.inl"

}  // namespace avx512

const Scan avx512_scan = avx512::table("avx512");

}  // namespace patches
}  // namespace sparsecomm
SPARSECOMM_TARGET_END
#endif
