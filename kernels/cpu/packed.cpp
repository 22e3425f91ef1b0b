// Packing of entries, and rounding of their values. sparsecomm/wire/formats.py describes the format.
#include <algorithm>
#include <cstring>

#include "isa.hpp"
#include "kernels.hpp"

namespace sparsecomm {

namespace {

constexpr size_t HEAD = 16;  // bytes: first and span

template <class T>
T load(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class T>
void store(char* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

size_t bytes_for(uint64_t bits) { return size_t((bits + 63) / 64 * 8); }

const ValueCodec& codec(Kind kind) { return isa().codecs[int(kind)]; }

// Offsets of the areas of a message, in bytes. They do not overflow if memory has at least a bit per entry.
struct Layout {
    unsigned l;  // low bits of an index
    uint64_t low_bits, high_bits;
    size_t high, values, padding, end;
    Layout(size_t count, uint64_t span, Kind kind, bool float64_values) {
        const uint64_t apart = (span + 1) / count;
        l = apart ? unsigned(63 - __builtin_clzll(apart)) : 0;
        low_bits = uint64_t(count) * l;
        high_bits = (span >> l) + count;
        high = HEAD + bytes_for(low_bits);
        values = high + bytes_for(high_bits);
        padding = values + (kind == Kind::exact ? count * (float64_values ? 8 : 4) : codec(kind).bytes(count));
        end = (padding + 7) / 8 * 8;
    }
};

// Returns the kind used for values: exact if a value is not finite and the kind cannot represent it.
Kind sent_as(const float* values, size_t count, Kind kind) {
    return kind != Kind::exact && codec(kind).finite && !isa().all_finite(values, count) ? Kind::exact : kind;
}
constexpr uint64_t EXACT_FLAG = uint64_t(1) << 63;  // in the word of span: these values have the kind exact

// -- indices ----------------------------------------------------------------------------------------------------------

// Every step stores the current word, full or not, which avoids branches on the data.
template <class Index>
void pack_low(const Index* index, size_t count, unsigned l, char* out) {
    const uint64_t first = uint64_t(index[0]), mask = (uint64_t(1) << l) - 1;
    uint64_t word = 0, bit = 0;
    const auto low = [&](size_t i) { return (uint64_t(index[i]) - first) & mask; };
    const auto put = [&](uint64_t bits, unsigned length) {
        const unsigned shift = bit % 64;
        word |= bits << shift;
        store(out + bit / 64 * 8, word);
        word = shift + length < 64 ? word : bits >> 1 >> (63 - shift);
        bit += length;
    };
    const auto four = [&](size_t i) { return (low(i) | low(i + 1) << l) | (low(i + 2) | low(i + 3) << l) << 2 * l; };
    size_t i = 0;
    if (l <= 8)
        for (; i + 8 <= count; i += 8) put(four(i) | four(i + 4) << 4 * l, 8 * l);
    if (l <= 16)
        for (; i + 4 <= count; i += 4) put(four(i), 4 * l);
    for (; i < count; i++) put(low(i), l);
    store(out + bit / 64 * 8, word);  // may overwrite the first word of high, which is written later
}

template <class Index>
void pack_high(const Index* index, size_t count, unsigned l, char* out, size_t bytes) {
    const uint64_t first = uint64_t(index[0]);
    std::memset(out, 0, bytes);
    uint64_t word = 0, current = 0;  // the current word
    for (size_t i = 0; i < count; i++) {
        const uint64_t bit = ((uint64_t(index[i]) - first) >> l) + i;
        if (bit / 64 != current) {  // every 32 entries or so
            store(out + current * 8, word);
            word = 0;
            current = bit / 64;
        }
        word |= uint64_t(1) << bit % 64;
    }
    store(out + current * 8, word);
}

// Adds the low bits to indices made from the high bits.
template <class Index>
void unpack_low(const char* data, size_t count, unsigned l, Index* index) {
    const uint64_t mask = (uint64_t(1) << l) - 1;
    uint64_t bit = 0;
    const auto next = [&](unsigned length) {  // reads past the end of low into high
        const char* p = data + bit / 64 * 8;
        const unsigned shift = bit % 64;
        bit += length;
        return load<uint64_t>(p) >> shift | load<uint64_t>(p + 8) << 1 << (63 - shift);
    };
    const auto add = [&](size_t i, uint64_t bits) { index[i] = Index(uint64_t(index[i]) + (bits & mask)); };
    size_t i = 0;
    if (l <= 16)
        for (; i + 4 <= count; i += 4) {
            const uint64_t bits = next(4 * l), later = bits >> 2 * l;
            add(i, bits);
            add(i + 1, bits >> l);
            add(i + 2, later);
            add(i + 3, later >> l);
        }
    for (; i < count; i++) add(i, next(l));
}

UnpackHigh<int32_t> unpack_high(int32_t) { return isa().high32; }
UnpackHigh<int64_t> unpack_high(int64_t) { return isa().high64; }

// -- values -----------------------------------------------------------------------------------------------------------

void pack_values(Sparse entries, Kind kind, const Layout& at, char* out) {
    if (kind == Kind::exact)
        std::memcpy(out + at.values, entries.values, at.padding - at.values);
    else
        codec(kind).pack(static_cast<const float*>(entries.values), entries.count, out + at.values);
    std::memset(out + at.padding, 0, at.end - at.padding);
}

// Returns null, or a description of the error.
const char* unpack_values(const char* data, size_t count, Kind kind, const Layout& at, void* values) {
    if (kind != Kind::exact) return codec(kind).unpack(data + at.values, count, static_cast<float*>(values));
    std::memcpy(values, data + at.values, at.padding - at.values);
    return nullptr;
}

bool all_zero(const char* begin, const char* end) {
    return std::all_of(begin, end, [](char c) { return c == 0; });
}

// Returns whether the unused bits of an area's last word are zero.
bool clean(const char* area, uint64_t bits) {
    return bits % 64 == 0 || load<uint64_t>(area + bits / 64 * 8) >> bits % 64 == 0;
}

template <class F>
decltype(auto) with_index(bool int64_indices, F&& f) {
    return int64_indices ? f(int64_t()) : f(int32_t());
}

template <class F>
decltype(auto) with_span(Sparse entries, bool int64_indices, F&& f) {
    return with_index(int64_indices, [&](auto zero) {
        const auto* index = static_cast<const decltype(zero)*>(entries.indices);
        const uint64_t first = uint64_t(index[0]);
        return f(index, first, uint64_t(index[entries.count - 1]) - first);
    });
}

// The decoded header of a message.
struct Head {
    uint64_t first, span;
    Kind kind;
    Head(const char* data, Kind expected) : first(load<uint64_t>(data)), span(load<uint64_t>(data + 8)), kind(expected) {
        if (expected == Kind::exact || !codec(expected).finite || !(span & EXACT_FLAG)) return;
        span &= ~EXACT_FLAG;
        kind = Kind::exact;
    }
};

}  // namespace

size_t packed_bytes(Sparse entries, Kind kind, bool int64_indices, bool float64_values) {
    if (entries.count == 0) return 0;
    kind = sent_as(static_cast<const float*>(entries.values), entries.count, kind);
    return with_span(entries, int64_indices, [&](const auto*, uint64_t, uint64_t span) {
        return Layout(entries.count, span, kind, float64_values).end;
    });
}

void pack(Sparse entries, Kind kind, bool int64_indices, bool float64_values, void* to) {
    if (entries.count == 0) return;
    const Kind sent = sent_as(static_cast<const float*>(entries.values), entries.count, kind);
    with_span(entries, int64_indices, [&](const auto* index, uint64_t first, uint64_t span) {
        auto* out = static_cast<char*>(to);
        const Layout at(entries.count, span, sent, float64_values);
        store(out, first);
        store(out + 8, sent == kind ? span : span | EXACT_FLAG);
        pack_low(index, entries.count, at.l, out + HEAD);
        pack_high(index, entries.count, at.l, out + at.high, at.values - at.high);
        pack_values(entries, sent, at, out);
    });
}

constexpr const char* TOO_SHORT = "too few bytes for the number of entries";
constexpr const char* TOO_LONG = "too many bytes for the number of entries";

const char* check_packed(const void* packed, size_t bytes, size_t count, size_t size, Kind kind, bool float64_values) {
    const auto* data = static_cast<const char*>(packed);
    if (count > size) return "more entries than the vector has elements";
    if (count == 0) return bytes ? "data in a message without entries" : nullptr;
    if (bytes < HEAD || bytes < count / 8) return TOO_SHORT;  // an entry takes at least one bit
    const Head head(data, kind);
    if (head.first >= size || head.span >= size - head.first) return "indices beyond the end of the vector";
    const Layout at(count, head.span, head.kind, float64_values);
    if (bytes != at.end) return bytes < at.end ? TOO_SHORT : TOO_LONG;
    return nullptr;
}

const char* unpack(const void* packed, size_t bytes, size_t count, size_t size, Kind kind, bool int64_indices, bool float64_values,
                   void* indices, void* values) {
    if (const char* fault = check_packed(packed, bytes, count, size, kind, float64_values)) return fault;
    if (count == 0) return nullptr;
    const auto* data = static_cast<const char*>(packed);
    const Head head(data, kind);
    const Layout at(count, head.span, head.kind, float64_values);
    if (!clean(data + HEAD, at.low_bits) || !clean(data + at.high, at.high_bits) ||
        !all_zero(data + at.padding, data + at.end))
        return "unused bits that are not zero";
    const bool all = with_index(int64_indices, [&](auto zero) {
        auto* index = static_cast<decltype(zero)*>(indices);
        const bool found = unpack_high(zero)(data + at.high, at.values - at.high, head.first, count, at.l, index);
        if (found) unpack_low(data + HEAD, count, at.l, index);
        return found;
    });
    if (!all) return "a number of indices that differs from the number of entries";
    return unpack_values(data, count, head.kind, at, values);
}

size_t quantize_values(const float* values, size_t count, Kind kind, float* rounded, float* errors) {
    if (sent_as(values, count, kind) == kind) return codec(kind).quantize(values, count, rounded, errors);
    size_t zeros = 0;
    for (size_t i = 0; i < count; i++) {
        rounded[i] = bit_cast<float>(canonical<F32>(bit_cast<uint32_t>(values[i] + 0.0f)));  // -0 becomes 0
        errors[i] = 0;
        zeros += rounded[i] == 0;
    }
    return zeros;
}

}  // namespace sparsecomm
