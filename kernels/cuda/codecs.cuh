// Encodings of values in packed messages: one structure for each of KINDS in sparsecomm/tensors/kinds.py.
//
// As there, each structure declares the BYTES of a value or its bit PLANES, with one word per block each; SHARING, the values
// per block (0: no blocks); and SHARED, the bytes that a block adds. Byte kinds have `Sent`, the type in messages, and
// conversions between it and the accumulator, given the exponent e of the block. An object of a kind with planes describes
// the magnitudes of a block. Compiled for ACC, the accumulator's format.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

using Value = ACC::Accumulator;

constexpr i32 MIN_EXPONENT = -126, MAX_EXPONENT = 121;

DEVICE bool is_finite(Value v) { return magnitude(ACC::narrow(v)) < ACC::infinity; }

constexpr u64 BLOCK = 2 * WARP;  // values that share data, if the kind has blocks: two of each lane

// Unchanged, including NaN.
struct Exact {
    using Sent = ACC::Bits;
    static constexpr u64 BYTES = sizeof(Sent), PLANES = 0, SHARING = 0, SHARED = 0;
    static DEVICE Sent narrow(Value v, i32) { return ACC::narrow(v); }
    static DEVICE Value widen(Sent bits, i32) { return ACC::widen(bits); }
};

// As 16-bit floats, rounded to nearest even; finite values remain finite.
template <class Format>
struct Rounded {
    using Sent = typename Format::Bits;
    static constexpr u64 BYTES = sizeof(Sent), PLANES = 0, SHARING = 0, SHARED = 0;
    static DEVICE Sent narrow(Value v, i32) {
        const Sent bits = Format::narrow(v);
        return magnitude(bits) == Format::infinity && is_finite(v) ? Sent(bits - 1) : canonical<Format>(bits);
    }
    static DEVICE Value widen(Sent bits, i32) { return Format::widen(bits); }
};

// As q 2^e with one e per 64 consecutive values, rounded to nearest even. Infinities and NaN have special values of q.
struct Int8 {
    using Sent = signed char;
    static constexpr u64 BYTES = sizeof(Sent), PLANES = 0, SHARING = BLOCK, SHARED = 1;
    static constexpr Sent MAX = 126, INFINITE = 127, NOT_A_NUMBER = -128;

    // Returns the smallest e in [MIN_EXPONENT, MAX_EXPONENT] for which no finite value of the block exceeds MAX * 2^e. Only
    // the largest floats exceed MAX * 2^MAX_EXPONENT, and become it. Each lane has two values. All lanes call it.
    static DEVICE i32 exponent_of(float a, float b) {
        const u32 x = is_finite(a) ? magnitude(F32::narrow(a)) : 0, y = is_finite(b) ? magnitude(F32::narrow(b)) : 0;
        const u32 max_bits = warp_max(x > y ? x : y);
        const i32 e = i32(max_bits >> 23) - 133 + ((max_bits & 0x7fffffu) > 0x7c0000u);  // MAX: 2^6, mantissa 0x7c0000
        return e < MIN_EXPONENT ? MIN_EXPONENT : e > MAX_EXPONENT ? MAX_EXPONENT : e;
    }
    static DEVICE Sent narrow(float v, i32 e) {
        if (v != v) return NOT_A_NUMBER;
        const float q = rintf(v * power_of_two(-e)), limit = is_finite(v) ? MAX : INFINITE;
        return Sent(q > limit ? limit : q < -limit ? -limit : q);
    }
    static DEVICE float widen(Sent q, i32 e) {
        if (q == NOT_A_NUMBER) return F32::widen(F32::nan);
        return float(q) * (q == INFINITE || q == -INFINITE ? F32::widen(F32::infinity) : power_of_two(e));
    }
};

// As a sign and one of 2^BITS magnitudes: kernels/few_bits.hpp, with these primitives. All lanes call them.
constexpr u32 HELD = 2;  // a lane has a value of each half of a block

DEVICE float sum_of(const float* v) { return warp_sum(v[0] + v[1]); }
DEVICE float largest_of(const float* v) { return F32::widen(warp_max(F32::narrow(v[0] > v[1] ? v[0] : v[1]))); }
DEVICE float smallest_of(const float* v, u32 count) {
    const u32 lane = threadIdx.x % WARP, none = F32::infinity;  // floats that are not negative order like their bits
    const u32 x = lane < count ? F32::narrow(v[0]) : none, y = lane + WARP < count ? F32::narrow(v[1]) : none;
    return F32::widen(none - warp_max(none - (x < y ? x : y)));
}
// Returns a word whose bit i is a of lane i, and whose bit i + WARP is b of lane i.
DEVICE u64 plane_of(bool a, bool b) { return u64(__ballot_sync(ALL_LANES, a)) | u64(__ballot_sync(ALL_LANES, b)) << WARP; }
DEVICE u64 signs(const float* v) { return plane_of(F32::narrow(v[0]) >> 31, F32::narrow(v[1]) >> 31); }
DEVICE void spread(u64 bits, u32* words) {
    const u32 lane = threadIdx.x % WARP;
    words[0] = 0u - u32(bits >> lane & 1), words[1] = 0u - u32(bits >> lane >> WARP & 1);
}
template <class Test>
DEVICE u32 keep_if(const float* v, float* kept, Test test) {
    const bool a = test(v[0]), b = test(v[1]);
    kept[0] = a ? v[0] : 0, kept[1] = b ? v[1] : 0;
    return u32(__popcll(plane_of(a, b)));
}

#include "few_bits.hpp"

}  // namespace sparsecomm
