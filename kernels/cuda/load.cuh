// Elements of a gradient and of its residual, sixteen bytes at a time.
//
// Compiled for one pair of formats: X is the gradient's; ACC that of what is selected from, which is the residual's if
// there is one (RESIDUAL) and X's if not. INDEX is i32 or i64.
#pragma once

#include "scan.cuh"
#include "tuning.cuh"

namespace sparsecomm {

using X = FORMAT;
using Acc = ACC;
using Index = INDEX;
using XBits = X::Bits;
using AccBits = Acc::Bits;

// Elements that move together: sixteen bytes of the gradient.
constexpr u32 VECTOR = sizeof(Chunk) / sizeof(XBits);

template <class Bits>
struct Group {
    Bits element[VECTOR];
};

// Elements [i, i + VECTOR) of n; those beyond n are zero. `aligned`: data is at a multiple of 16 bytes.
template <class Bits>
DEVICE Group<Bits> load_group(const Bits* data, u64 i, u64 n, bool aligned) {
    constexpr u32 CHUNKS = sizeof(Group<Bits>) / sizeof(Chunk);
    Group<Bits> g;
    if (aligned && i + VECTOR <= n) {
UNROLL
        for (u32 c = 0; c < CHUNKS; c++) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(data + i)[c];
            memcpy(reinterpret_cast<char*>(&g) + c * sizeof chunk, &chunk, sizeof chunk);
        }
    } else {
UNROLL
        for (u32 e = 0; e < VECTOR; e++) g.element[e] = i + e < n ? data[i + e] : Bits(0);
    }
    return g;
}

template <class Bits>
DEVICE void store_group(Bits* data, u64 i, u64 n, bool aligned, const Group<Bits>& g) {
    constexpr u32 CHUNKS = sizeof(Group<Bits>) / sizeof(Chunk);
    if (aligned && i + VECTOR <= n) {
UNROLL
        for (u32 c = 0; c < CHUNKS; c++) {
            Chunk chunk;
            memcpy(&chunk, reinterpret_cast<const char*>(&g) + c * sizeof chunk, sizeof chunk);
            reinterpret_cast<Chunk*>(data + i)[c] = chunk;
        }
    } else {
UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            if (i + e < n) data[i + e] = g.element[e];
    }
}

// What is selected from: x, or residual + x as it is stored. x may be null: then the residual alone.
DEVICE Group<AccBits> accumulated(const XBits* x, const AccBits* residual, u64 i, u64 n, bool aligned) {
#if RESIDUAL
    Group<AccBits> acc = load_group(residual, i, n, aligned);
    if (x != nullptr) {
        const Group<XBits> g = load_group(x, i, n, aligned);
UNROLL
        for (u32 e = 0; e < VECTOR; e++)
            acc.element[e] = Acc::narrow(Acc::widen(acc.element[e]) + X::widen(g.element[e]));
    }
    return acc;
#else
    return load_group(x, i, n, aligned);
#endif
}

DEVICE AccBits key_of(AccBits bits) { return sparsecomm::key_of(bits, Acc::infinity); }

// The sum that is sent: in the carrier, every NaN the same.
DEVICE Acc::Carrier value_of(AccBits bits) { return Acc::widen(canonical<Acc>(bits)); }

}  // namespace sparsecomm
