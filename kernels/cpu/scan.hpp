// One pass over the data that collects candidates, in parts for several threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "buffer.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace sparsecomm {

// The filter for x alone, or for r + x as stored in format R.
template <class Bits>
struct Source {
    Filter<Bits> filter;
    const void* x;
    Bits* r;  // null without a residual
};

inline Source<uint16_t> source(F16, const Dense& x, const Dense* r) {
    return {r ? isa().f16_f16 : isa().plain16, x.data, r ? static_cast<uint16_t*>(r->data) : nullptr};
}
inline Source<uint16_t> source(BF16, const Dense& x, const Dense* r) {
    return {r ? isa().bf16_bf16 : isa().plain16, x.data, r ? static_cast<uint16_t*>(r->data) : nullptr};
}
inline Source<uint32_t> source(F32, const Dense& x, const Dense* r) {
    if (!r) return {isa().plain32, x.data, nullptr};
    const auto filter = x.type == Type::f16 ? isa().f16_f32 : x.type == Type::bf16 ? isa().bf16_f32 : isa().f32_f32;
    return {filter, x.data, static_cast<uint32_t*>(r->data)};
}
inline Source<uint64_t> source(F64, const Dense& x, const Dense* r) {
    return {r ? isa().f64_f64 : isa().plain64, x.data, r ? static_cast<uint64_t*>(r->data) : nullptr};
}

inline Filter<uint16_t> held_filter(uint16_t) { return isa().held16; }
inline Filter<uint32_t> held_filter(uint32_t) { return isa().held32; }
inline Filter<uint64_t> held_filter(uint64_t) { return isa().held64; }

inline Filter<uint16_t> plain_filter(uint16_t) { return isa().plain16; }
inline Filter<uint32_t> plain_filter(uint32_t) { return isa().plain32; }
inline Filter<uint64_t> plain_filter(uint64_t) { return isa().plain64; }

inline const Select<uint16_t>& select_loops(uint16_t) { return isa().select16; }
inline const Select<uint32_t>& select_loops(uint32_t) { return isa().select32; }
inline const Select<uint64_t>& select_loops(uint64_t) { return isa().select64; }

// The candidates of elements [begin, end); indices are relative to begin.
template <class Bits>
struct Part {
    size_t begin, end;
    Buffer<uint32_t> index;
    Buffer<Bits> bits;
    size_t count = 0, capacity = 0;
    Bits threshold = 1;

    void reserve(Scratch& scratch, size_t wanted) {
        Buffer<uint32_t> more_index(scratch, wanted);
        Buffer<Bits> more_bits(scratch, wanted);
        std::copy_n(index.get(), count, more_index.get());
        std::copy_n(bits.get(), count, more_bits.get());
        index = std::move(more_index);
        bits = std::move(more_bits);
        capacity = wanted;
    }
};

template <class Bits>
std::vector<Part<Bits>> make_parts(size_t n, int threads) {
    constexpr size_t GRAIN = size_t(1) << 18;  // minimum elements per part
    constexpr size_t MAX = size_t(1) << 31;   // indices within a part are uint32
    const size_t count = std::max(parts_for(n, GRAIN, threads), (n + MAX - 1) / MAX);
    std::vector<Part<Bits>> parts(count);
    for (size_t p = 0; p < count; p++) {
        parts[p].begin = n / count * p / 64 * 64;
        parts[p].end = p + 1 < count ? n / count * (p + 1) / 64 * 64 : n;
    }
    return parts;
}

// Collects the candidates of a part; full(part) makes room by dropping candidates or growing.
template <class Bits, class Full>
void collect(const Source<Bits>& s, Part<Bits>& part, Full&& full) {
    for (size_t position = part.begin; position < part.end;) {
        position = s.filter(s.x, s.r, part.begin, position, part.end, part.threshold, part.index.get(), part.bits.get(),
                            &part.count, part.capacity);
        if (position < part.end) full(part);
    }
}

// Restores entries where the filter has cleared them.
template <class Format, class Bits = typename Format::Bits>
void restore(Bits* r, size_t base, const uint32_t* index, const Bits* bits, size_t count) {
    for (size_t i = 0; i < count; i++) r[base + index[i]] = canonical<Format>(bits[i]);
}

// Converts candidates to entries: full indices, accumulator values, one NaN.
template <class Format, class Index>
void write(const Part<typename Format::Bits>& part, Index* indices, typename Format::Accumulator* values) {
    const auto base = Index(part.begin);
    for (size_t i = 0; i < part.count; i++) indices[i] = base + Index(part.index[i]);
    for (size_t i = 0; i < part.count; i++) {
        using Carried = std::conditional_t<sizeof(typename Format::Accumulator) == 8, F64, F32>;
        const auto value = Format::widen(part.bits[i]);
        values[i] = bit_cast<typename Format::Accumulator>(
            canonical<Carried>(bit_cast<typename Carried::Bits>(value)));
    }
}

template <class Format>
void write_all(const std::vector<Part<typename Format::Bits>>& parts, bool int64_indices, void* indices, void* values,
               int threads) {
    parallel(parts.size(), threads, [&](size_t p) {
        size_t begin = 0;
        for (size_t before = 0; before < p; before++) begin += parts[before].count;
        auto* to = static_cast<typename Format::Accumulator*>(values) + begin;
        if (int64_indices)
            write<Format>(parts[p], static_cast<int64_t*>(indices) + begin, to);
        else
            write<Format>(parts[p], static_cast<int32_t*>(indices) + begin, to);
    });
}

}  // namespace sparsecomm
