// The inner loops for AVX-512 (F, BW, VL, DQ). Entries are compressed in a register and then stored: a compressing
// store to memory is microcoded on Zen 4.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "../formats.hpp"
#include "isa.hpp"
#include "target.hpp"

SPARSECOMM_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,bmi,bmi2,f16c,popcnt")
namespace sparsecomm {
namespace avx512 {

#include "sources.inl"

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }
inline void store(void* p, __m512i v) { _mm512_storeu_si512(p, v); }

// Masked loads and stores, which do not access the memory of other lanes.
inline __m512i load_lanes(uint64_t mask, const uint16_t* p) { return _mm512_maskz_loadu_epi16(__mmask32(mask), p); }
inline __m512i load_lanes(uint64_t mask, const uint32_t* p) { return _mm512_maskz_loadu_epi32(__mmask16(mask), p); }
inline __m512i load_lanes(uint64_t mask, const uint64_t* p) { return _mm512_maskz_loadu_epi64(__mmask8(mask), p); }
inline __mmask16 first_lanes(size_t count) { return __mmask16(count < 16 ? (1u << count) - 1 : 0xffff); }

// Returns magnitudes, and the lanes in which they reach the threshold.
inline __m512i magnitudes(__m512i v, uint16_t) { return _mm512_and_si512(v, _mm512_set1_epi16(0x7fff)); }
inline __m512i magnitudes(__m512i v, uint32_t) { return _mm512_and_si512(v, _mm512_set1_epi32(0x7fffffff)); }
inline __m512i magnitudes(__m512i v, uint64_t) {
    return _mm512_and_si512(v, _mm512_set1_epi64(0x7fffffffffffffffll));
}
inline uint64_t reach(__m512i v, uint16_t threshold) {
    return _mm512_cmpge_epu16_mask(magnitudes(v, threshold), _mm512_set1_epi16(short(threshold)));
}
inline uint64_t reach(__m512i v, uint32_t threshold) {
    return _mm512_cmpge_epu32_mask(magnitudes(v, threshold), _mm512_set1_epi32(int(threshold)));
}
inline uint64_t reach(__m512i v, uint64_t threshold) {
    return _mm512_cmpge_epu64_mask(magnitudes(v, threshold), _mm512_set1_epi64((long long)(threshold)));
}

template <class Bits>
inline uint64_t block(const Plain<Bits>& s, size_t i, Bits threshold) {
    constexpr size_t lanes = 64 / sizeof(Bits);
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += lanes) mask |= reach(load(s.x + i + j), threshold) << j;
    return mask;
}

// Converts sixteen elements to floats, and back.
inline __m512 widen(F32, const uint32_t* p) { return _mm512_loadu_ps(p); }
inline __m512 widen(F16, const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 widen(BF16, const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m256i narrow(F16, __m512 v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m256i narrow(BF16, __m512 v) {
    const __m512i b = _mm512_castps_si512(v), top = _mm512_srli_epi32(b, 16);
    const __m512i even = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40)));
}

// Computes sixteen sums; each product and each sum is rounded.
template <class X, class R>
inline __m512 sums(const Fused<X, R>& s, size_t i) {
    return _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(s.decay), widen(R{}, s.r + i)), widen(X{}, s.x + i));
}

template <class X>
inline uint64_t block(const Fused<X, F32>& s, size_t i, uint32_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 16) {
        const __m512 sum = sums<X, F32>(s, i + j);
        _mm512_storeu_ps(s.r + i + j, sum);
        mask |= reach(_mm512_castps_si512(sum), threshold) << j;
    }
    return mask;
}

template <class X>
inline uint64_t block16(const Fused<X, X>& s, size_t i, uint16_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 32) {
        const __m256i low = narrow(X{}, sums<X, X>(s, i + j)), high = narrow(X{}, sums<X, X>(s, i + j + 16));
        const __m512i sum = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        store(s.r + i + j, sum);
        mask |= reach(sum, threshold) << j;
    }
    return mask;
}
inline uint64_t block(const Fused<F16, F16>& s, size_t i, uint16_t threshold) { return block16(s, i, threshold); }
inline uint64_t block(const Fused<BF16, BF16>& s, size_t i, uint16_t threshold) { return block16(s, i, threshold); }

inline uint64_t block(const Fused<F64, F64>& s, size_t i, uint64_t threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; j < 64; j += 8) {
        const __m512d scaled = _mm512_mul_pd(_mm512_set1_pd(s.decay), _mm512_loadu_pd(s.r + i + j));
        const __m512d sum = _mm512_add_pd(scaled, _mm512_loadu_pd(s.x + i + j));
        _mm512_storeu_pd(s.r + i + j, sum);
        mask |= reach(_mm512_castpd_si512(sum), threshold) << j;
    }
    return mask;
}

inline size_t append_positions(uint64_t mask, uint32_t local, uint32_t* index, size_t o) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (uint32_t j = 0; j < 64; j += 16) {
        const __mmask16 m = __mmask16(mask >> j);
        const __m512i where = _mm512_add_epi32(iota, _mm512_set1_epi32(int(local + j)));
        store(index + o, _mm512_maskz_compress_epi32(m, where));
        o += size_t(__builtin_popcount(m));
    }
    return o;
}

// Appends the entries of a block selected by its mask, without branches on the data; returns the new o. This is slower for
// sources with few entries per block.
template <class S>
constexpr bool takes_blocks = std::is_same_v<S, Held<uint32_t>>;
inline size_t take_block(const Held<uint32_t>& s, size_t i, uint64_t mask, uint32_t local, uint32_t* index, uint32_t* bits, size_t o) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (uint32_t j = 0; j < 64; j += 16) {
        const __mmask16 m = __mmask16(mask >> j);
        store(index + o, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(iota, _mm512_set1_epi32(int(local + j)))));
        store(bits + o, _mm512_maskz_compress_epi32(m, load(s.r + i + j)));
        _mm512_mask_storeu_epi32(s.r + i + j, m, _mm512_setzero_si512());
        o += size_t(__builtin_popcount(m));
    }
    return o;
}

inline size_t between_blocks(const uint32_t* bits, size_t count, uint32_t low, uint32_t high, uint32_t* out, size_t* o) {
    size_t i = 0, n = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i m = magnitudes(load(bits + i), uint32_t());
        const __mmask16 hit = _mm512_mask_cmplt_epu32_mask(_mm512_cmpge_epu32_mask(m, _mm512_set1_epi32(int(low))), m,
                                                           _mm512_set1_epi32(int(high)));
        store(out + n, _mm512_maskz_compress_epi32(hit, m));
        n += size_t(__builtin_popcount(hit));
    }
    *o = n;
    return i;
}
template <class Bits>
inline size_t between_blocks(const Bits*, size_t, Bits, Bits, Bits*, size_t*) { return 0; }

template <class Bits>
inline size_t reaching_blocks(const Bits* bits, size_t count, Bits threshold, size_t* o) {
    constexpr size_t lanes = 64 / sizeof(Bits);
    size_t i = 0, n = 0;
    for (; i + lanes <= count; i += lanes) n += size_t(__builtin_popcountll(reach(load(bits + i), threshold)));
    const uint64_t rest = (uint64_t(1) << (count - i)) - 1;
    *o = n + size_t(__builtin_popcountll(reach(load_lanes(rest, bits + i), threshold) & rest));
    return count;
}

// Returns the lowest lanes of `equal`, as many as the quota of ties allows.
inline __mmask16 first_ties(__mmask16 equal, size_t* ties) {
    const size_t count = size_t(__builtin_popcount(equal));
    if (count <= *ties) {
        *ties -= count;
        return equal;
    }
    const __mmask16 first = __mmask16(_pdep_u32((1u << *ties) - 1u, equal));
    *ties = 0;
    return first;
}

inline size_t split_blocks(const uint32_t* index, const uint32_t* bits, size_t count, Limit<uint32_t>& limit,
                           const Kept<uint32_t>& kept, uint32_t* lost_index, uint32_t* lost_bits, size_t* stay_count,
                           size_t* lost_count) {
    const __m512i above = _mm512_set1_epi32(int(limit.infinity + 1)), threshold = _mm512_set1_epi32(int(limit.kth));
    const __m512i base = _mm512_set1_epi32(int(kept.base)), nan = _mm512_set1_epi32(int(limit.nan));
    size_t i = 0, stay = 0, lost = 0;
    for (; i < count && stay < kept.room; i += 16) {
        const __mmask16 there = first_lanes(count - i);
        const __m512i where = load_lanes(there, index + i), what = load_lanes(there, bits + i);
        const __m512i key = _mm512_min_epu32(magnitudes(what, uint32_t()), above);
        __mmask16 stays = _mm512_mask_cmpgt_epu32_mask(there, key, threshold);
        const __mmask16 equal = _mm512_mask_cmpeq_epu32_mask(there, key, threshold);
        if (equal) stays |= first_ties(equal, &limit.ties);
        if (lost_index) {
            const __mmask16 goes = __mmask16(there & ~stays);
            store(lost_index + lost, _mm512_maskz_compress_epi32(goes, where));
            store(lost_bits + lost, _mm512_maskz_compress_epi32(goes, what));
            lost += size_t(__builtin_popcount(goes));
        }
        const __m512i value = _mm512_mask_mov_epi32(what, _mm512_cmpeq_epu32_mask(key, above), nan);
        const size_t number = size_t(__builtin_popcount(stays));
        const __mmask16 first = first_lanes(number);
        _mm512_mask_storeu_epi32(kept.index + stay, first, _mm512_maskz_compress_epi32(stays, _mm512_add_epi32(where, base)));
        _mm512_mask_storeu_epi32(kept.bits + stay, first, _mm512_maskz_compress_epi32(stays, value));
        stay += number;
    }
    *stay_count = stay;
    *lost_count = lost;
    return i < count ? i : count;
}
template <class Bits>
inline size_t split_blocks(const uint32_t*, const Bits*, size_t, Limit<Bits>&, const Kept<Bits>&, uint32_t*, Bits*,
                           size_t*, size_t*) {
    return 0;
}

template <class Format>
inline void widen_block(Format f, const uint16_t* bits, float* values) {
    for (size_t j = 0; j < 64; j += 16) _mm512_storeu_ps(values + j, widen(f, bits + j));
}
template <class Format>
inline void narrow_block(Format f, const float* values, uint16_t* bits) {
    for (size_t j = 0; j < 64; j += 16)
        _mm256_storeu_si256((__m256i*)(bits + j), narrow(f, _mm512_loadu_ps(values + j)));
}

inline size_t high_words(const char* words, size_t bytes, uint64_t first, size_t count, unsigned l, int32_t* index,
                         size_t* begin) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i by = _mm_cvtsi32_si128(int(l));
    size_t i = 0, at = 0;
    for (; at < bytes && count - i >= 64; at += 8)
        for (size_t part = at; part < at + 8; part += 2) {
            uint16_t bits;
            memcpy(&bits, words + part, sizeof bits);
            const __m512i zeros = _mm512_sub_epi32(_mm512_maskz_compress_epi32(bits, iota), iota);
            const __m512i base = _mm512_set1_epi32(int(uint32_t(first + ((part * 8 - i) << l))));
            store(index + i, _mm512_add_epi32(_mm512_sll_epi32(zeros, by), base));
            i += size_t(__builtin_popcount(bits));
        }
    *begin = at;
    return i;
}
inline size_t high_words(const char*, size_t, uint64_t, size_t, unsigned, int64_t*, size_t*) { return 0; }

inline uint64_t signs(const float* values) {
    uint64_t bits = 0;
    for (size_t j = 0; j < 64; j += 16) bits |= uint64_t(_mm512_movepi32_mask(load(values + j))) << j;
    return bits;
}
inline void spread(uint64_t bits, uint32_t* all_or_none) {
    for (size_t j = 0; j < 64; j += 16) store(all_or_none + j, _mm512_movm_epi32(__mmask16(bits >> j)));
}

#include "indices.inl"
#include "values.inl"
#include "few_bits.inl"
#include "loops.inl"

}  // namespace avx512

const Isa avx512_isa = avx512::table("avx512");

}  // namespace sparsecomm
SPARSECOMM_TARGET_END
#endif
