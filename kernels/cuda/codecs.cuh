// How values travel in packed messages: one structure for each of KINDS in sparsecomm/tensors/kinds.py.
//
// Each has `Sent`, the type that travels; SHARING, how many values in a row share an exponent e (0: none do); and
// conversions between `Sent` and the accumulator. Compiled for ACC, the accumulator's format.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

using Value = ACC::Accumulator;

constexpr i32 MIN_EXPONENT = -126, MAX_EXPONENT = 121;

DEVICE bool is_finite(Value v) { return magnitude(ACC::narrow(v)) < ACC::infinity; }

// As they are, NaN too.
struct Exact {
    using Sent = ACC::Bits;
    static constexpr u64 SHARING = 0;
    static DEVICE Sent narrow(Value v, i32) { return ACC::narrow(v); }
    static DEVICE Value widen(Sent bits, i32) { return ACC::widen(bits); }
};

// As floats of 16 bits, to nearest even; what is finite stays finite.
template <class Format>
struct Rounded {
    using Sent = typename Format::Bits;
    static constexpr u64 SHARING = 0;
    static DEVICE Sent narrow(Value v, i32) {
        const Sent bits = Format::narrow(v);
        return magnitude(bits) == Format::infinity && is_finite(v) ? Sent(bits - 1) : canonical<Format>(bits);
    }
    static DEVICE Value widen(Sent bits, i32) { return Format::widen(bits); }
};

// As q 2^e, with one e for 64 values in a row; to nearest even. What is not finite has numbers of its own.
struct Int8 {
    using Sent = signed char;
    static constexpr u64 SHARING = 64;
    static constexpr Sent MAX = 126, INFINITE = 127, NOT_A_NUMBER = -128;
    static_assert(SHARING == 2 * WARP, "a lane has two values of a block");

    static DEVICE float power(i32 e) { return bit_cast<float>(u32(e + 127) << 23); }  // 2^e

    // The smallest e in [MIN_EXPONENT, MAX_EXPONENT] for which no finite value of the block is above MAX * 2^e; the
    // greatest floats of all are, and become MAX * 2^MAX_EXPONENT. Each lane has two values. All lanes call it.
    static DEVICE i32 exponent_of(float a, float b) {
        const u32 x = is_finite(a) ? magnitude(F32::narrow(a)) : 0, y = is_finite(b) ? magnitude(F32::narrow(b)) : 0;
        u32 max_bits = x > y ? x : y;
        for (u32 d = WARP / 2; d > 0; d /= 2) {
            const u32 other = __shfl_xor_sync(ALL_LANES, max_bits, d);
            max_bits = max_bits > other ? max_bits : other;
        }
        const i32 e = i32(max_bits >> 23) - 133 + ((max_bits & 0x7fffffu) > 0x7c0000u);  // MAX: 2^6, mantissa 0x7c0000
        return e < MIN_EXPONENT ? MIN_EXPONENT : e > MAX_EXPONENT ? MAX_EXPONENT : e;
    }
    static DEVICE Sent narrow(float v, i32 e) {
        if (v != v) return NOT_A_NUMBER;
        const float q = rintf(v * power(-e)), limit = is_finite(v) ? MAX : INFINITE;
        return Sent(q > limit ? limit : q < -limit ? -limit : q);
    }
    static DEVICE float widen(Sent q, i32 e) {
        if (q == NOT_A_NUMBER) return F32::widen(F32::nan);
        return float(q) * (q == INFINITE || q == -INFINITE ? F32::widen(F32::infinity) : power(e));
    }
};

}  // namespace sparsecomm
