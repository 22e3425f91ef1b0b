// Loads and stores elements of a gradient and of its residual, sixteen bytes at a time.
//
// Compiled for one pair of formats: FORMAT is the gradient's (X). ACC is the format of the elements selected from: the
// residual's if RESIDUAL, else X. INDEX is int or long long.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

using X = FORMAT;
using Acc = ACC;
using Index = INDEX;
using XBits = X::Bits;
using AccBits = Acc::Bits;

// Number of elements loaded at once: sixteen bytes of the gradient.
constexpr u32 VECTOR = sizeof(Vector) / sizeof(XBits);

// VECTOR elements, packed as in memory, so that 16-bit elements need half the registers.
template <class Bits>
struct Group {
    static constexpr u32 VECTORS = VECTOR * sizeof(Bits) / sizeof(Vector);
    Vector vector[VECTORS];

    DEVICE Bits get(u32 e) const {
        if constexpr (sizeof(Bits) == 2) return Bits(word(e / 2) >> (e % 2 * 16));
        else if constexpr (sizeof(Bits) == 4) return word(e);
        else return word(2 * e) | Bits(word(2 * e + 1)) << 32;
    }
    DEVICE void set(u32 e, Bits bits) {
        if constexpr (sizeof(Bits) == 2) {
            const u32 shift = e % 2 * 16;
            word(e / 2) = (word(e / 2) & ~(0xffffu << shift)) | u32(bits) << shift;
        } else if constexpr (sizeof(Bits) == 4) {
            word(e) = bits;
        } else {
            word(2 * e) = u32(bits);
            word(2 * e + 1) = u32(bits >> 32);
        }
    }
    DEVICE u32 word(u32 w) const { return vector[w / 4].word[w % 4]; }
    DEVICE u32& word(u32 w) { return vector[w / 4].word[w % 4]; }
};

// Returns elements [i, i + VECTOR) of n; elements beyond n are zero. `aligned`: the address of data is a multiple of 16.
template <class Bits>
DEVICE Group<Bits> load_group(const Bits* data, u64 i, u64 n, bool aligned) {
    Group<Bits> g;
    if (aligned && i + VECTOR <= n) {
        UNROLL
        for (u32 c = 0; c < Group<Bits>::VECTORS; c++) g.vector[c] = reinterpret_cast<const Vector*>(data + i)[c];
    } else {
        UNROLL
        for (u32 w = 0; w < 4 * Group<Bits>::VECTORS; w++) g.word(w) = 0;
        UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            if (i + e < n) g.set(e, data[i + e]);
    }
    return g;
}

// Stores elements [i, i + VECTOR) of n.
template <class Bits>
DEVICE void store_group(Bits* data, u64 i, u64 n, bool aligned, const Group<Bits>& g) {
    if (aligned && i + VECTOR <= n) {
        UNROLL
        for (u32 c = 0; c < Group<Bits>::VECTORS; c++) reinterpret_cast<Vector*>(data + i)[c] = g.vector[c];
    } else {
        UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            if (i + e < n) data[i + e] = g.get(e);
    }
}

// Returns decay * residual + x as stored; the product and the sum are each rounded.
DEVICE Group<AccBits> sum_of(Group<AccBits> residual, const Group<XBits>& x, Acc::Accumulator decay) {
    UNROLL
    for (u32 e = 0; e < VECTOR; e++) residual.set(e, Acc::narrow(decay * Acc::widen(residual.get(e)) + X::widen(x.get(e))));
    return residual;
}

// Returns the elements to select from: x, or decay * residual + x; only the residual if x is null.
DEVICE Group<AccBits> accumulated(const XBits* x, const AccBits* residual, u64 i, u64 n, bool aligned, Acc::Accumulator decay = 1) {
#if RESIDUAL
    const Group<AccBits> acc = load_group(residual, i, n, aligned);
    return x == nullptr ? acc : sum_of(acc, load_group(x, i, n, aligned), decay);
#else
    return load_group(x, i, n, aligned);
#endif
}

// Loads COUNT groups like `accumulated`, APART elements from each other. If `whole` (all elements exist and are aligned),
// starts all loads before using the first.
template <u32 COUNT, u32 APART>
DEVICE void accumulate(Group<AccBits> (&acc)[COUNT], const XBits* x, const AccBits* residual, u64 i, u64 n, bool aligned,
                       bool whole, Acc::Accumulator decay = 1) {
    constexpr u64 ANY = ~0ull;
#if RESIDUAL
    if (whole && x != nullptr) {
        Group<XBits> addend[COUNT];
        UNROLL
        for (u32 c = 0; c < COUNT; c++) acc[c] = load_group(residual, i + c * APART, ANY, true);
        UNROLL
        for (u32 c = 0; c < COUNT; c++) addend[c] = load_group(x, i + c * APART, ANY, true);
        UNROLL
        for (u32 c = 0; c < COUNT; c++) acc[c] = sum_of(acc[c], addend[c], decay);
        return;
    }
#else
    if (whole) {
        UNROLL
        for (u32 c = 0; c < COUNT; c++) acc[c] = load_group(x, i + c * APART, ANY, true);
        return;
    }
#endif
    UNROLL
    for (u32 c = 0; c < COUNT; c++) acc[c] = accumulated(x, residual, i + c * APART, n, aligned, decay);
}

DEVICE AccBits key_of(AccBits bits) { return sparsecomm::key_of(bits, Acc::infinity); }

// Returns the value of an entry in the accumulator type; every NaN becomes the same.
DEVICE Acc::Accumulator value_of(AccBits bits) { return Acc::widen(canonical<Acc>(bits)); }

}  // namespace sparsecomm
