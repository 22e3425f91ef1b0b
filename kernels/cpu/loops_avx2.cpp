// The inner loops for AVX2, BMI2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../formats.hpp"
#include "isa.hpp"
#include "target.hpp"

SPARSECOMM_TARGET_BEGIN("avx2,bmi,bmi2,f16c,popcnt")
namespace sparsecomm {
namespace avx2 {

#include "sources.inl"
#include "scalar.inl"

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// Returns the lanes whose magnitude exceeds `under`, the threshold minus one (magnitudes are positive signed integers).
inline uint32_t over(__m256i v, uint16_t under) {
    const __m256i m = _mm256_and_si256(v, _mm256_set1_epi16(0x7fff));
    const __m256i hit = _mm256_cmpgt_epi16(m, _mm256_set1_epi16(short(under)));
    return _pext_u32(uint32_t(_mm256_movemask_epi8(hit)), 0x55555555u);
}
inline uint32_t over(__m256i v, uint32_t under) {
    const __m256i m = _mm256_and_si256(v, _mm256_set1_epi32(0x7fffffff));
    return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(m, _mm256_set1_epi32(int(under))))));
}
inline uint32_t over(__m256i v, uint64_t under) {
    const __m256i m = _mm256_and_si256(v, _mm256_set1_epi64x(0x7fffffffffffffffll));
    const __m256i hit = _mm256_cmpgt_epi64(m, _mm256_set1_epi64x((long long)(under)));
    return uint32_t(_mm256_movemask_pd(_mm256_castsi256_pd(hit)));
}

template <class Bits>
inline uint64_t block(const Plain<Bits>& s, size_t i, Bits threshold) {
    constexpr size_t lanes = 32 / sizeof(Bits);
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += lanes) mask |= uint64_t(over(load(s.x + i + j), Bits(threshold - 1))) << j;
    return mask;
}

// Converts eight elements to floats, and back.
inline __m256 widen(F32, const uint32_t* p) { return _mm256_castsi256_ps(load(p)); }
inline __m256 widen(F16, const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m256 widen(BF16, const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline __m128i narrow(F16, __m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m128i narrow(BF16, __m256 v) {
    const __m256i b = _mm256_castps_si256(v), top = _mm256_srli_epi32(b, 16);
    const __m256i even = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i out = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
}

// Computes eight sums; each product and each sum is rounded.
template <class X, class R>
inline __m256 sums(const Fused<X, R>& s, size_t i) {
    return _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(s.decay), widen(R{}, s.r + i)), widen(X{}, s.x + i));
}

template <class X>
inline uint64_t block(const Fused<X, F32>& s, size_t i, uint32_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 8) {
        const __m256i sum = _mm256_castps_si256(sums<X, F32>(s, i + j));
        store(s.r + i + j, sum);
        mask |= uint64_t(over(sum, threshold - 1)) << j;
    }
    return mask;
}

template <class X>
inline uint64_t block16(const Fused<X, X>& s, size_t i, uint16_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 16) {
        const __m128i low = narrow(X{}, sums<X, X>(s, i + j)), high = narrow(X{}, sums<X, X>(s, i + j + 8));
        const __m256i sum = _mm256_set_m128i(high, low);
        store(s.r + i + j, sum);
        mask |= uint64_t(over(sum, uint16_t(threshold - 1))) << j;
    }
    return mask;
}
inline uint64_t block(const Fused<F16, F16>& s, size_t i, uint16_t threshold) { return block16(s, i, threshold); }
inline uint64_t block(const Fused<BF16, BF16>& s, size_t i, uint16_t threshold) { return block16(s, i, threshold); }

inline uint64_t block(const Fused<F64, F64>& s, size_t i, uint64_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 4) {
        const __m256d scaled = _mm256_mul_pd(_mm256_set1_pd(s.decay), _mm256_castsi256_pd(load(s.r + i + j)));
        const __m256d sum = _mm256_add_pd(scaled, _mm256_castsi256_pd(load(s.x + i + j)));
        store(s.r + i + j, _mm256_castpd_si256(sum));
        mask |= uint64_t(over(_mm256_castpd_si256(sum), threshold - 1)) << j;
    }
    return mask;
}

// For each mask of eight lanes, the permutation that moves the set lanes to the front.
struct Lanes {
    alignas(8) uint8_t of[256][8];
    constexpr Lanes() : of() {
        for (unsigned mask = 0; mask < 256; mask++)
            for (unsigned lane = 0, o = 0; lane < 8; lane++)
                if (mask >> lane & 1) of[mask][o++] = uint8_t(lane);
    }
};
constexpr Lanes lanes;

inline size_t append_positions(uint64_t mask, uint32_t local, uint32_t* index, size_t o) {
    for (uint32_t j = 0; j < 64; j += 8, mask >>= 8) {
        const unsigned m = mask & 0xff;
        const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)lanes.of[m]));
        store(index + o, _mm256_add_epi32(order, _mm256_set1_epi32(int(local + j))));
        o += size_t(__builtin_popcount(m));
    }
    return o;
}

template <class Format>
inline void widen_block(Format f, const uint16_t* bits, float* values) {
    for (size_t j = 0; j < 64; j += 8) _mm256_storeu_ps(values + j, widen(f, bits + j));
}
template <class Format>
inline void narrow_block(Format f, const float* values, uint16_t* bits) {
    for (size_t j = 0; j < 64; j += 8) _mm_storeu_si128((__m128i*)(bits + j), narrow(f, _mm256_loadu_ps(values + j)));
}

inline uint64_t signs(const float* values) {
    uint64_t bits = 0;
    for (size_t j = 0; j < 64; j += 8) bits |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_loadu_ps(values + j)))) << j;
    return bits;
}
inline void spread(uint64_t bits, uint32_t* all_or_none) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (size_t j = 0; j < 64; j += 8) {
        const __m256i its = _mm256_and_si256(_mm256_set1_epi32(int(bits >> j & 0xff)), lane);
        store(all_or_none + j, _mm256_cmpeq_epi32(its, lane));
    }
}

#include "indices.inl"
#include "values.inl"
#include "few_bits.inl"
#include "loops.inl"

}  // namespace avx2

const Isa avx2_isa = avx2::table("avx2");

}  // namespace sparsecomm
SPARSECOMM_TARGET_END
#endif
