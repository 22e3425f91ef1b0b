// AdamW's steps with the sums of an exchange, for all weights or a few. The results are those of kernels/cpu/adamw.cpp.
//
// Compiled for X (FORMAT), the format of weights and gradients, and INDEX; all other numbers have X's accumulator type. Grids:
// any number of blocks. Deterministic: each element or entry is the work of one thread.
#include "scan.cuh"

using namespace sparsecomm;

namespace {

using X = FORMAT;
using Bits = X::Bits;
using Index = INDEX;
using Real = X::Accumulator;

template <bool DOUBLE>
struct Types {
    using Word = u32;
    using Exponent = unsigned char;  // of a unit
};
template <>
struct Types<true> {
    using Word = u64;
    using Exponent = u16;
};
constexpr bool DOUBLE = sizeof(Real) == 8;
constexpr u32 DIGITS = DOUBLE ? 52 : 23;
constexpr int BIAS = DOUBLE ? 1023 : 127;
using Word = Types<DOUBLE>::Word;
using Exponent = Types<DOUBLE>::Exponent;
constexpr Word INFINITE = Word(2 * BIAS + 1) << DIGITS;  // the bits of infinity

DEVICE u64 grid_thread() { return u64(blockIdx.x) * DENSE_THREADS + threadIdx.x; }
DEVICE u64 grid_threads() { return u64(gridDim.x) * DENSE_THREADS; }

DEVICE Real unit_of(int exponent) { return bit_cast<Real>(Word(exponent) << DIGITS); }
DEVICE int exponent_of(Real x) { return int(bit_cast<Word>(x) >> DIGITS); }
DEVICE bool is_finite(Real x) { return magnitude(bit_cast<Word>(x)) < INFINITE; }
DEVICE Real absolute(Real x) { return bit_cast<Real>(magnitude(bit_cast<Word>(x))); }
DEVICE int clamped(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

}  // namespace

// Adds 1 to `faults` in every thread that finds a quotient scale * x / unit, or a square of scale * x, that is not finite.
//
//   x, exponents  [in]      n elements, and the exponents of their units
//   faults        [in,out]
KERNEL void __launch_bounds__(DENSE_THREADS)
check_quotients(const Bits* x, const Exponent* exponents, u64 n, Real scale, u32* faults) {
    bool good = true;
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        const Real scaled = scale * X::widen(x[i]);
        good &= is_finite(scaled * scaled) && is_finite(scaled / unit_of(exponents[i]));
    }
    if (!good) atomicAdd(faults, 1u);
}

// residual += scale * x / unit, each operation rounded, unless there are `faults`.
//
//   x, exponents  [in]      n elements, and the exponents of their units
//   faults        [in]      how many were found; or null
//   residual      [in,out]  n elements
KERNEL void __launch_bounds__(DENSE_THREADS)
add_quotients(const Bits* x, const Exponent* exponents, u64 n, Real scale, const u32* faults, Real* residual) {
    if (faults && *faults) return;
    for (u64 i = grid_thread(); i < n; i += grid_threads()) residual[i] += scale * X::widen(x[i]) / unit_of(exponents[i]);
}

// Makes all steps of weights since their last update: `Backend.adamw`.
//
//   weights, mean, squares, last, compensation, exponents  [in]  elements, more than the last index; compensation may be null
//   indices, values  [in]      `count` entries; no indices: the first `count` elements
//   rows             [in]      `num_rows` rows of 6 coefficients
//   new_*, changes   [out]     `count` elements each; changes may be null
//   jumps            [out]     `count` changes of exponents, or OVERFLOWS
//   overflows        [in,out]  every thread adds the number of its entries that overflow
KERNEL void __launch_bounds__(DENSE_THREADS)
adamw(const Bits* weights, const Real* mean, const Real* squares, const i32* last, const Real* compensation,
      const Exponent* exponents, const Index* indices, const Real* values, u64 count, const Real* rows, u64 num_rows,
      Real unit_eps, Real eps, Real limit, Real margin, i32 step, Real* new_weights, Real* new_mean, Real* new_squares,
      Real* changes, signed char* jumps, u32* overflows) {
    u32 found = 0;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        const u64 i = indices ? u64(indices[e]) : e;
        const i64 passed = i64(step) - last[i];
        const Real* row = rows + 6 * (passed < 0 ? 0 : u64(passed) < num_rows ? u64(passed) : num_rows - 1);
        const int unit = exponents[i];
        const Real before = X::widen(weights[i]), weight = compensation ? before + compensation[i] : before;
        const Real g = values[e] * unit_of(unit);
        const Real m = row[0] * mean[i] + row[1] * g, v = row[2] * squares[i] + row[3] * (g * g);
        const Real root = sqrt(v), w = row[5] * weight - row[4] * (m / (root + eps)), moved = w - before;
        const Real size = root + unit_eps;
        const int up = exponent_of(size * Real(0.75)) - unit, down = exponent_of(size * Real(1.5)) - unit;
        const bool fits = absolute(w) + margin * absolute(moved) < limit || !is_finite(before);
        const bool usable = is_finite(m) && is_finite(v) && fits;
        jumps[e] = usable ? (signed char)(clamped(up > 0 ? up : down < 0 ? down : 0, -MAX_JUMP, MAX_JUMP)) : OVERFLOWS;
        found += !usable;
        new_weights[e] = w;
        new_mean[e] = m;
        new_squares[e] = v;
        if (changes) changes[e] = moved;
    }
    if (found) atomicAdd(overflows, found);
}

// Stores results of `adamw`: `Backend.store_adamw`.
//
//   weights, mean, squares, last, compensation  [in,out]  as in `adamw`; weights are written if `write`
//   exponents                                   [in,out]  of units, which jump where the weight changes; or null
//   indices, count, new_*, changes, jumps       [in]      as in `adamw`
KERNEL void __launch_bounds__(DENSE_THREADS)
store_adamw(Bits* weights, Real* mean, Real* squares, i32* last, Real* compensation, Exponent* exponents, const Index* indices,
            u64 count, const Real* new_weights, const Real* new_mean, const Real* new_squares, const Real* changes,
            const signed char* jumps, i32 step, bool write) {
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        const u64 i = indices ? u64(indices[e]) : e;
        if (write) weights[i] = canonical<X>(X::narrow(new_weights[e]));
        if (compensation) {
            const Real lost = new_weights[e] - X::widen(weights[i]);
            compensation[i] = is_finite(lost) ? lost : Real(0);
        }
        mean[i] = new_mean[e];
        squares[i] = new_squares[e];
        last[i] = step;
        if (exponents && changes[e] != 0) exponents[i] = Exponent(clamped(exponents[i] + jumps[e], 1, 2 * BIAS));
    }
}

// Adds changes to exponents of units, and converts residuals: `Backend.change_units`.
//
//   residual, exponents       [in,out]  elements, more than the last index
//   indices, values           [in]      changes, which are rounded to integers
//   host_count, device_count  [in]      their number: as in dense.cu
KERNEL void __launch_bounds__(DENSE_THREADS)
change_units(Real* residual, Exponent* exponents, const Index* indices, const Real* values, u64 host_count,
             const u64* device_count) {
    const u64 count = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        const u64 i = u64(indices[e]);
        const Real wanted = rint(values[e]), max_ = Real(MAX_JUMP), limited = wanted < -max_ ? -max_ : wanted > max_ ? max_ : wanted;
        const int old = exponents[i], jump = clamped(old + int(limited), 1, 2 * BIAS) - old;
        exponents[i] = Exponent(old + jump);
        const Real converted = residual[i] * unit_of(BIAS - jump), largest = bit_cast<Real>(Word(INFINITE - 1));
        residual[i] = absolute(converted) <= largest ? converted : converted < 0 ? -largest : largest;
    }
}
