// The inner loops for each instruction set: one table per set, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../adamw.hpp"
#include "kernels.hpp"

namespace sparsecomm {

// Appends the entries of elements [begin, end) whose magnitude is at least `threshold` to (index, bits) at *count, in
// order. Stops early when room for fewer than 64 is left; returns the position reached (a multiple of 64, or end).
// `index` receives positions minus `origin`, the begin of the part. With a residual r: stores r = r + x, with 0 at the
// appended entries, and `bits` receives r + x. If r is x itself, only stores 0 at the appended entries.
template <class Bits>
using Filter = size_t (*)(const void* x, void* r, size_t origin, size_t begin, size_t end, Bits threshold, uint32_t* index,
                          Bits* bits, size_t* count, size_t capacity);

// Writes the positions, plus `base`, of the elements of [0, count) whose magnitude is at least `threshold`, in order; returns
// their number. With a residual r: stores r = decay * r + x first. Needs room for count + 64.
template <class Bits>
using Locate = size_t (*)(const void* x, void* r, double decay, size_t count, Bits threshold, uint32_t base, uint32_t* index);

// Copies the magnitudes in [low, high) to `out` (room for count + 16; may be `bits`); returns their number.
template <class Bits>
using Between = size_t (*)(const Bits* bits, size_t count, Bits low, Bits high, Bits* out);

// Returns the number of magnitudes that are at least `threshold`.
template <class Bits>
using Reaching = size_t (*)(const Bits* bits, size_t count, Bits threshold);

template <class Bits>
struct Kth {
    Bits key;     // the r-th largest
    size_t ties;  // number of keys equal to it among the r largest, at least 1
};

// Returns the magnitude of a rank in a list that fits in the cache; 1 <= rank <= count. Needs room for count + 16.
template <class Bits>
using ByCounting = Kth<Bits> (*)(const Bits* bits, size_t count, size_t rank, Bits* room);

// Arrays for the `room` entries that remain. May be the source arrays.
template <class Bits>
struct Kept {
    uint32_t* index;  // of an entry, plus base
    Bits* bits;       // every NaN as `nan`
    size_t room;
    uint32_t base;
};
// Which entries remain: keys above kth, and the first `ties` equal to it. Keys are clamped at infinity + 1.
template <class Bits>
struct Limit {
    Bits kth, infinity, nan;
    size_t ties;
};

// Splits entries, in order, into remaining ones and the others, which are written to (lost_index, lost_bits) unless null
// (room for all + 16).
template <class Bits>
using Split = void (*)(const uint32_t* index, const Bits* bits, size_t count, Limit<Bits> limit, Kept<Bits> kept,
                       uint32_t* lost_index, Bits* lost_bits);

// Returns the largest magnitude.
template <class Bits>
using Largest = Bits (*)(const Bits* bits, size_t count);

template <class Bits>
struct Select {
    Between<Bits> between;
    Reaching<Bits> reaching;
    ByCounting<Bits> by_counting;
    Split<Bits> split;
    Largest<Bits> largest;
};

// Sets packed indices from their high bits; see indices.inl. Returns false if there are fewer than `count`.
template <class Index>
using UnpackHigh = bool (*)(const char* words, size_t bytes, uint64_t first, size_t count, unsigned l, Index* index);

// Encoding of values of one kind: `bytes` per value, or `planes` 64-bit words per block of values, followed by `shared` bytes
// for each block.
struct ValueCodec {
    size_t itemsize, planes, block, shared;
    bool finite;  // it cannot represent values that are not finite
    void (*pack)(const float* values, size_t count, char* out);
    const char* (*unpack)(const char* data, size_t count, float* values);  // null, or a description of the error
    size_t (*quantize)(const float* values, size_t count, float* rounded, float* errors);  // returns the number of zeros

    size_t blocks(size_t count) const { return block ? (count + block - 1) / block : 0; }
    size_t value_bytes(size_t count) const { return planes ? blocks(count) * planes * 8 : count * itemsize; }
    size_t bytes(size_t count) const { return value_bytes(count) + blocks(count) * shared; }
};

// sum += factor * x / unit, each operation rounded.
template <class X, class Accumulator>
using Quotients = void (*)(const typename X::Bits* x, const UnitExponent<Accumulator>* exponent, Accumulator factor,
                           Accumulator* sum, size_t count);

// The data of some weights for AdamW, with the coefficients of each. Exponents and jumps have the width of the other elements.
template <class Accumulator>
struct AdamWBlock {
    static constexpr size_t SIZE = 64;
    using Integer = typename Unit<Accumulator>::Integer;
    Accumulator weight[SIZE], mean[SIZE], square[SIZE], gradient[SIZE], row[6][SIZE];
    Accumulator before[SIZE], change[SIZE];  // the stored weight, and how the new one differs from it
    Integer exponent[SIZE], jump[SIZE];
    int32_t last[SIZE];
};
// Makes a step with gradients that are divided by their units, and computes changes and jumps.
template <class Accumulator>
using AdamWStep = void (*)(AdamWBlock<Accumulator>& block, AdamWLimits<Accumulator> limits);

struct Isa {
    const char* name;
    Filter<uint16_t> plain16, held16, f16_f16, bf16_bf16;
    Filter<uint32_t> plain32, held32, f32_f32, f16_f32, bf16_f32;
    Filter<uint64_t> plain64, held64, f64_f64;
    Locate<uint16_t> locate_plain16, locate_f16_f16, locate_bf16_bf16;
    Locate<uint32_t> locate_plain32, locate_f32_f32, locate_f16_f32, locate_bf16_f32;
    Locate<uint64_t> locate_plain64, locate_f64_f64;
    Select<uint16_t> select16;
    Select<uint32_t> select32;
    Select<uint64_t> select64;
    ValueCodec codecs[KINDS];  // by kind; none for exact
    UnpackHigh<int32_t> high32;
    UnpackHigh<int64_t> high64;
    bool (*all_finite)(const float* values, size_t count);
    Quotients<F32, float> quotients32;
    Quotients<F16, float> quotients16;
    Quotients<BF16, float> quotients_bf16;
    Quotients<F64, double> quotients64;
    AdamWStep<float> adamw32;
    AdamWStep<double> adamw64;
};

extern const Isa portable_isa;
#if defined(__x86_64__)
extern const Isa avx2_isa, avx512_isa;
#endif

// Returns the best instruction set of this processor, unless another one was chosen.
const Isa& isa();

// Uses the named set (portable, avx2, avx512) from now on; false if it is unknown or not supported.
bool use_isa(const char* name);

}  // namespace sparsecomm
