// AdamW's arithmetic for one weight, and that of the units in which gradients are exchanged. CPU and CUDA kernels share this
// file, so that results are equal. Each operation is rounded. A is the accumulator type.
#pragma once

#include "formats.hpp"

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

namespace sparsecomm {

// Units are powers of two. Their exponents are biased, at least 1, and stored as `Exponent`.
template <class A>
struct Unit {
    using Word = uint32_t;
    using Integer = int;
    using Exponent = unsigned char;
    static constexpr int DIGITS = 23, BIAS = 127;
};
template <>
struct Unit<double> {
    using Word = uint64_t;
    using Integer = long long;
    using Exponent = uint16_t;
    static constexpr int DIGITS = 52, BIAS = 1023;
};
template <class A>
using UnitExponent = typename Unit<A>::Exponent;
template <class A>
constexpr typename Unit<A>::Word INFINITE = typename Unit<A>::Word(2 * Unit<A>::BIAS + 1) << Unit<A>::DIGITS;  // its bits

constexpr int MAX_JUMP = 4;     // the most that an exponent changes in a step
constexpr int OVERFLOWS = 127;  // instead of a jump: the step of the weight must not be used

template <class A, class Integer>
SPARSECOMM_ANYWHERE A unit_of(Integer exponent) {
    return bit_cast<A>(typename Unit<A>::Word(exponent) << Unit<A>::DIGITS);
}
SPARSECOMM_ANYWHERE float absolute(float x) { return fabsf(x); }
SPARSECOMM_ANYWHERE double absolute(double x) { return fabs(x); }
template <class A>
SPARSECOMM_ANYWHERE A largest_finite() {
    return bit_cast<A>(typename Unit<A>::Word(INFINITE<A> - 1));
}
template <class A>
SPARSECOMM_ANYWHERE bool is_finite(A x) {
    return absolute(x) <= largest_finite<A>();
}
SPARSECOMM_ANYWHERE float square_root(float x) { return sqrtf(x); }
SPARSECOMM_ANYWHERE double square_root(double x) { return sqrt(x); }

// Returns the row of coefficients for a weight that was last updated in step `last`. The last row is for all earlier steps, too.
SPARSECOMM_ANYWHERE uint64_t row_of(long long step, int last, uint64_t rows) {
    const long long passed = step - last;
    return passed < 0 ? 0 : uint64_t(passed) < rows ? uint64_t(passed) : rows - 1;
}

// Makes all steps of a weight since its last update. c0 to c5 are `coefficients` of sparsecomm/optimizers/adamw.py.
template <class A>
SPARSECOMM_ANYWHERE void adamw_step(A& weight, A& mean, A& square, A gradient, A c0, A c1, A c2, A c3, A c4, A c5, A eps) {
    mean = c0 * mean + c1 * gradient;
    square = c2 * square + c3 * (gradient * gradient);
    weight = c5 * weight - c4 * (mean / (square_root(square) + eps));
}

template <class A>
struct AdamWLimits {
    A eps, unit_eps, weight, margin;
};

// Returns how the exponent of a weight's unit should change, or OVERFLOWS. `before` is the stored weight, the others are new.
// An exponent changes if the root has left the octave of the unit by a factor of 4/3 or more. The step is also used if the
// stored weight is not finite.
template <class A, class Integer = typename Unit<A>::Integer>
SPARSECOMM_ANYWHERE Integer jump_of(A weight, A mean, A square, A before, Integer exponent, AdamWLimits<A> limits) {
    const A root = square_root(square) + limits.unit_eps;
    const Integer up = (bit_cast<Integer>(root * A(0.75)) >> Unit<A>::DIGITS) - exponent;
    const Integer down = (bit_cast<Integer>(root * A(1.5)) >> Unit<A>::DIGITS) - exponent;
    const bool fits = (absolute(weight) + limits.margin * absolute(weight - before) < limits.weight) | !is_finite(before);
    const bool usable = is_finite(mean) & is_finite(square) & fits;
    constexpr Integer NONE = 0, MOST = MAX_JUMP, UNUSABLE = OVERFLOWS;
    const Integer rise = up > NONE ? up : NONE, fall = down < NONE ? down : NONE;  // one of them is 0
    const Integer above = rise + fall > -MOST ? rise + fall : -MOST, jump = above > MOST ? MOST : above;
    return usable ? jump : UNUSABLE;
}

// Returns what rounding has kept from a weight.
template <class A>
SPARSECOMM_ANYWHERE A compensation_of(A exact, A stored) {
    const A lost = exact - stored;
    return is_finite(lost) ? lost : A(0);
}

// Returns the exponent of a unit after a jump.
template <class A>
SPARSECOMM_ANYWHERE UnitExponent<A> jumped(int exponent, int jump) {
    const int to = exponent + jump, last = 2 * Unit<A>::BIAS;
    return UnitExponent<A>(to < 1 ? 1 : to > last ? last : to);
}

// Changes a unit, by `change` rounded to an integer, and converts a residual to it.
template <class A>
SPARSECOMM_ANYWHERE void change_unit(A& residual, UnitExponent<A>& exponent, A change) {
    const A limit = A(MAX_JUMP), limited = change < -limit ? -limit : change > limit ? limit : change;
    const int old = exponent, now = jumped<A>(old, int(sizeof(A) == 8 ? rint(double(limited)) : rintf(float(limited))));
    exponent = UnitExponent<A>(now);
    const A converted = residual * unit_of<A>(Unit<A>::BIAS + old - now);
    residual = is_finite(converted) ? converted : converted < 0 ? -largest_finite<A>() : largest_finite<A>();
}

}  // namespace sparsecomm
