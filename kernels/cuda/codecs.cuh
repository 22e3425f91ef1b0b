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

DEVICE float power(i32 e) { return bit_cast<float>(u32(e + 127) << 23); }  // 2^e, a normal number

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
    static constexpr u64 BYTES = sizeof(Sent), PLANES = 0, SHARING = 64, SHARED = 1;
    static constexpr Sent MAX = 126, INFINITE = 127, NOT_A_NUMBER = -128;
    static_assert(SHARING == 2 * WARP, "a lane has two values of a block");

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
        const float q = rintf(v * power(-e)), limit = is_finite(v) ? MAX : INFINITE;
        return Sent(q > limit ? limit : q < -limit ? -limit : q);
    }
    static DEVICE float widen(Sent q, i32 e) {
        if (q == NOT_A_NUMBER) return F32::widen(F32::nan);
        return float(q) * (q == INFINITE || q == -INFINITE ? F32::widen(F32::infinity) : power(e));
    }
};

// As a sign and one of 2^BITS magnitudes: lowest() + j * spacing(), j from 0 to LAST, exact and finite. Each lane has two
// values of a block, one from each half; zeros follow the last value. All lanes call functions that take values. To get the
// same results as kernels/cpu/few_bits.inl, every operation is rounded to float, and sums add the second half of the terms
// to the first, repeatedly.
template <u32 BITS>
struct FewBits {
    static constexpr u64 BYTES = 0, PLANES = BITS + 1, SHARING = 64, SHARED = BITS ? 3 : 2;
    static constexpr i32 LAST = (1 << BITS) - 1, UNIT = BITS == 1 ? 16 : 2;
    static_assert(SHARING == 2 * WARP, "a lane has two values of a block");
    u32 lowest_bits;  // a bfloat16
    u32 step;         // 8 bits

    DEVICE float lowest() const { return bfloat_to_float(uint16_t(lowest_bits)); }
    DEVICE float unit() const {  // unit in the last place of lowest()
        const u32 biased = lowest_bits >> 7;
        return bit_cast<float>(biased >= 8 ? (biased - 7) << 23 : 1u << (15 + (biased ? biased : 1)));
    }
    DEVICE float spacing() const { return float(i32(step) * UNIT) * unit(); }
    DEVICE bool valid() const { return lowest_bits && lowest_bits <= 0x7f7f && is_finite(lowest() + float(LAST) * spacing()); }

    // Returns the description of a quantized block, from its `count` magnitudes.
    static DEVICE FewBits found_in(float u, float v, u32 count) {
        const u32 bits = F32::narrow(smallest(u, v, count)) >> 16;
        FewBits block{bits ? bits : 1, 0};
        const float high = largest(u, v);
        if constexpr (BITS > 0) block.step = to_byte((high - block.lowest()) / (float(LAST * UNIT) * block.unit()));
        return block;
    }

    // Chooses magnitudes with a small squared error for `count` magnitudes.
    static DEVICE FewBits chosen_for(float u, float v, u32 count) {
        const i32 top = i32(F32::narrow(largest(u, v)) >> 23) - 127, e = top < -126 ? -126 : top > 126 ? 126 : top;
        const float scale = power(-e);
        u = scaled(u, scale), v = scaled(v, scale);  // the largest is then from 1 to 2, unless denormal
        const float low = smallest(u, v, count), high = largest(u, v);
        const u32 lane = threadIdx.x % WARP;
        const bool has_u = lane < count, has_v = lane + WARP < count;
        u = has_u ? u - low : 0, v = has_v ? v - low : 0;  // distances from the smallest
        float lower = F32::widen(F32::infinity), upper = lower;
        if (BITS == 1) {  // split at 3/4 of (sum of squares / sum)
            const float total = warp_sum(u + v), squares = warp_sum(u * u + v * v);
            lower = upper = 0.75f * (squares / (total > 0 ? total : 1));
        } else if (BITS) {  // only magnitudes near the ends count
            lower = 3.0f / 32 * (high - low), upper = 29.0f / 32 * (high - low);
        }
        const float n_lower = counted(has_u && u <= lower, has_v && v <= lower);
        float a = low + warp_sum((u <= lower ? u : 0) + (v <= lower ? v : 0)) / n_lower;
        FewBits block{0, 0};
        if constexpr (BITS == 0) {
            block.lowest_bits = lowest_near(a, e);
        } else {
            const float n_upper = counted(u > upper, v > upper);
            const float mean = low + warp_sum((u > upper ? u : 0) + (v > upper ? v : 0)) / n_upper;
            float b = !(n_upper > 0) ? a : mean > high ? high : mean;
            if (!block.fit(a, b, e)) {  // choose a so that the ends a and ratio * a have the least squared error
                const float ratio = float(1 + LAST * UNIT);
                a = (n_lower * a + ratio * n_upper * b) / (n_lower + ratio * ratio * n_upper);
                b = ratio * a < b ? ratio * a : b;
                block.fit(a, b, e);
            }
        }
        return block;
    }

    // Returns the nearest level j of a magnitude; halfway cases round up.
    DEVICE u32 level_of(float u) const {
        const float base = step ? lowest() : F32::widen(F32::infinity);
        u32 level = 0;
        UNROLL
        for (u32 bit = BITS; bit-- > 0;) {
            if (u < base + (float(1 << bit) - 0.5f) * spacing()) continue;
            u -= float(1 << bit) * spacing();
            level |= 1u << bit;
        }
        return level;
    }

    DEVICE float value_of(u32 level, bool negative) const {
        const float u = lowest() + float(level) * spacing();
        return negative ? -u : u;
    }

  private:
    // Sets the lowest magnitude to about a, and the step so that the highest is near b. Returns false if the step would
    // exceed 255.
    DEVICE bool fit(float a, float b, i32 e) {
        lowest_bits = lowest_near(a, e);
        const float scale = power(-e), exact = (b - lowest() * scale) / (float(LAST * UNIT) * (unit() * scale));
        const float steps = exact + (BITS == 1 ? 0.5f : 0.0f);  // BITS == 1: round to nearest, else down
        step = to_byte(steps);
        return steps < 256;
    }

    static DEVICE u32 lowest_near(float a, i32 e) {
        const u32 bits = float_to_bfloat((a > 0x1p-14f ? a : 0x1p-14f) * power(e));
        return bits ? bits : 1;
    }
    static DEVICE u32 to_byte(float steps) { return u32(steps > 0 ? steps < 255 ? steps : 255 : 0); }  // rounds down
    static DEVICE float scaled(float u, float scale) { return u * scale > 2 ? 2 : u * scale; }
    static DEVICE float counted(bool u, bool v) {
        return float(__popc(__ballot_sync(ALL_LANES, u)) + __popc(__ballot_sync(ALL_LANES, v)));
    }
    static DEVICE float largest(float u, float v) { return F32::widen(warp_max(F32::narrow(u > v ? u : v))); }
    static DEVICE float smallest(float u, float v, u32 count) {
        const u32 lane = threadIdx.x % WARP, none = F32::infinity;  // floats that are not negative order like their bits
        const u32 x = lane < count ? F32::narrow(u) : none, y = lane + WARP < count ? F32::narrow(v) : none;
        return F32::widen(none - warp_max(none - (x < y ? x : y)));
    }
};

}  // namespace sparsecomm
