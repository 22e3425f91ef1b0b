// Number formats: bits, magnitudes, keys and conversions. CPU and CUDA kernels share this file, so that results are equal.
//
// The order of selection is (|v| descending, index ascending), with all NaN equal and above infinity. The bits of an IEEE
// format without the sign order like |v|, so selection compares unsigned integers ("keys") instead of floats: nothing is
// rounded, denormals are not flushed, and NaN only needs a clamp.
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no standard headers
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstddef>
#include <cstdint>
#include <cstring>
#endif

#ifdef __CUDACC__
#define SPARSECOMM_ANYWHERE __host__ __device__ inline
#define SPARSECOMM_ON_TARGET __device__ __forceinline__  // for functions that use primitives of the processor
#else
#define SPARSECOMM_ANYWHERE inline
#define SPARSECOMM_ON_TARGET inline
#endif

namespace sparsecomm {

enum class Type : int { f16 = 0, bf16 = 1, f32 = 2, f64 = 3 };  // the codes of sparsecomm/tensors/dtypes.py

template <class To, class From>
SPARSECOMM_ANYWHERE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

SPARSECOMM_ANYWHERE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // The bits of a half, shifted left, are the float divided by 2^112, also for denormals.
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
}

SPARSECOMM_ANYWHERE uint16_t float_to_half(float f) {  // to nearest, ties to even
    const uint32_t bits = bit_cast<uint32_t>(f);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {  // denormal half: a float addition rounds at its last place, 2^-24
        const float sum = bit_cast<float>(magnitude) + 0.5f;
        return uint16_t(sign | (bit_cast<uint32_t>(sum) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

SPARSECOMM_ANYWHERE float bfloat_to_float(uint16_t b) { return bit_cast<float>(uint32_t(b) << 16); }

SPARSECOMM_ANYWHERE uint16_t float_to_bfloat(float f) {  // to nearest, ties to even
    const uint32_t bits = bit_cast<uint32_t>(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Each format has Bits (an unsigned integer), Accumulator (the type of sums), widen, narrow, `infinity` (its bits) and `nan`
// (the bits of the only NaN in results).
struct F16 {
    using Bits = uint16_t;
    using Accumulator = float;
    static constexpr Bits infinity = 0x7c00, nan = 0x7e00;
    static SPARSECOMM_ANYWHERE Accumulator widen(Bits b) { return half_to_float(b); }
    static SPARSECOMM_ANYWHERE Bits narrow(Accumulator v) { return float_to_half(v); }
};
struct BF16 {
    using Bits = uint16_t;
    using Accumulator = float;
    static constexpr Bits infinity = 0x7f80, nan = 0x7fc0;
    static SPARSECOMM_ANYWHERE Accumulator widen(Bits b) { return bfloat_to_float(b); }
    static SPARSECOMM_ANYWHERE Bits narrow(Accumulator v) { return float_to_bfloat(v); }
};
struct F32 {
    using Bits = uint32_t;
    using Accumulator = float;
    static constexpr Bits infinity = 0x7f800000u, nan = 0x7fc00000u;
    static SPARSECOMM_ANYWHERE Accumulator widen(Bits b) { return bit_cast<float>(b); }
    static SPARSECOMM_ANYWHERE Bits narrow(Accumulator v) { return bit_cast<Bits>(v); }
};
struct F64 {
    using Bits = uint64_t;
    using Accumulator = double;
    static constexpr Bits infinity = 0x7ff0000000000000ull, nan = 0x7ff8000000000000ull;
    static SPARSECOMM_ANYWHERE Accumulator widen(Bits b) { return bit_cast<double>(b); }
    static SPARSECOMM_ANYWHERE Bits narrow(Accumulator v) { return bit_cast<Bits>(v); }
};

template <class Bits>
constexpr Bits magnitude_mask = Bits(Bits(~Bits(0)) >> 1);

template <class Bits>
SPARSECOMM_ANYWHERE Bits magnitude(Bits bits) { return Bits(bits & magnitude_mask<Bits>); }

SPARSECOMM_ANYWHERE float power_of_two(int exponent) { return bit_cast<float>(uint32_t(exponent + 127) << 23); }  // a normal number

// Returns the largest power of two that is at most x, for a positive normal x.
SPARSECOMM_ANYWHERE float floor_power_of_two(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & F32::infinity); }
SPARSECOMM_ANYWHERE double floor_power_of_two(double x) { return bit_cast<double>(bit_cast<uint64_t>(x) & F64::infinity); }

// Returns the key: the magnitude, with every NaN clamped to infinity + 1.
template <class Bits>
SPARSECOMM_ANYWHERE Bits key_of(Bits bits, Bits infinity) {
    const Bits m = magnitude(bits), nan = Bits(infinity + 1);
    return m < nan ? m : nan;
}

// Returns the smallest magnitude whose key is above `key`. A later element needs it to beat an element with `key`.
template <class Bits>
SPARSECOMM_ANYWHERE Bits above(Bits key, Bits infinity) {
    return key > infinity ? Bits(magnitude_mask<Bits> + 1) : Bits(key + 1);
}

template <class Format>
SPARSECOMM_ANYWHERE typename Format::Bits canonical(typename Format::Bits bits) {
    return magnitude(bits) > Format::infinity ? Format::nan : bits;
}

// Calls f(Format{}) for a type that is known at run time.
#ifndef __CUDACC_RTC__
template <class F>
inline decltype(auto) with_format(Type type, F&& f) {
    switch (type) {
        case Type::f16: return f(F16{});
        case Type::bf16: return f(BF16{});
        case Type::f32: return f(F32{});
        default: return f(F64{});
    }
}
#endif

}  // namespace sparsecomm
