// Arithmetic between dense vectors and entries.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <type_traits>

#include "dense.hpp"
#include "isa.hpp"
#include "kernels.hpp"

namespace sparsecomm {

namespace {

constexpr size_t GALLOP = 16;  // ratio of lengths from which searching beats walking
constexpr size_t BLOCK = 128;  // steps of a walk between additions
constexpr size_t LANES = 4;    // parts of both lists walked at once

// Returns whether all indices are in [0, size). Otherwise an index, or the last valid index minus it, is negative, and signs
// are easy to test with any instruction set.
template <class Index>
bool all_below(const Index* index, size_t count, size_t size) {
    using Unsigned = std::make_unsigned_t<Index>;  // its differences do not overflow
    const auto last = Unsigned(std::min(size, size_t(std::numeric_limits<Index>::max())) - 1);
    Unsigned signs = 0;
    for (size_t i = 0; i < count; i++) signs |= Unsigned(index[i]) | (last - Unsigned(index[i]));
    return Index(signs) >= 0;
}

// Adds a value to an element, in the accumulator type, rounded once.
template <class Format>
void add_to(typename Format::Bits& element, typename Format::Accumulator value) {
    element = canonical<Format>(Format::narrow(Format::widen(element) + value));
}

// Returns the position of the first of indices[from ... count) that is at least `index`, by a galloping search from `from`.
template <class Index>
size_t gallop(const Index* indices, size_t from, size_t count, Index index) {
    size_t step = 1, low = from, high = from;
    while (high < count && indices[high] < index) {
        low = high + 1;
        high += step;
        step *= 2;
    }
    return size_t(std::lower_bound(indices + low, indices + std::min(high, count), index) - indices);
}

// Like each_where, walks both lists without unpredictable branches. A step depends on the loads of the previous one, so
// several parts are walked in turn.
template <class Index, class F>
void walk_where(const Index* index, size_t count, const Index* other, size_t other_count, bool present, F&& f) {
    struct Part {
        size_t i, end, j, other_end, number;
        size_t found[BLOCK];
    } parts[LANES];
    for (size_t p = 0; p < LANES; p++) {
        const size_t begin = count * p / LANES;
        parts[p].i = begin;
        parts[p].j = p == 0 ? 0 : size_t(std::lower_bound(other, other + other_count, index[begin]) - other);
    }
    for (size_t p = 0; p < LANES; p++) {
        parts[p].end = p + 1 < LANES ? parts[p + 1].i : count;
        parts[p].other_end = p + 1 < LANES ? parts[p + 1].j : other_count;
    }
    const auto step = [&](Part& part) {
        const Index a = index[part.i], b = other[part.j];
        part.found[part.number] = part.i;
        part.number += (a <= b) & ((a == b) == present);
        part.i += a <= b;
        part.j += b <= a;
    };
    const auto flush = [&](Part& part) {
        for (size_t at = 0; at < part.number; at++) f(part.found[at]);
        part.number = 0;
    };
    for (Part& part : parts) part.number = 0;
    for (;;) {
        size_t steps = BLOCK;  // that cannot reach an end
        for (const Part& part : parts) steps = std::min({steps, part.end - part.i, part.other_end - part.j});
        if (steps == 0) break;
        for (size_t s = 0; s < steps; s++)
            for (Part& part : parts) step(part);
        for (Part& part : parts) flush(part);
    }
    for (Part& part : parts) {
        while (part.i < part.end && part.j < part.other_end) {
            if (part.number == BLOCK) flush(part);
            step(part);
        }
        flush(part);
        for (; part.i < part.end; part.i++)
            if (!present) f(part.i);
    }
}

// Calls f(position) for each of `count` indices that is, or is not, among the others.
template <class Index, class F>
void each_where(const Index* index, size_t count, const Index* other, size_t other_count, bool present, F&& f) {
    if (count == 0) return;
    size_t i = 0, j = 0;
    if (other_count / count >= GALLOP) {
        for (; i < count; i++) {
            j = gallop(other, j, other_count, index[i]);
            if ((j < other_count && other[j] == index[i]) == present) f(i);
        }
        return;
    }
    if (other_count > 0 && count / other_count < GALLOP) return walk_where(index, count, other, other_count, present, f);
    for (; j < other_count; j++) {
        const size_t next = gallop(index, i, count, other[j]);
        for (; i < next; i++)
            if (!present) f(i);
        if (i == count || index[i] != other[j]) continue;
        if (present) f(i);
        i++;
    }
    for (; i < count; i++)
        if (!present) f(i);
}

}  // namespace

void scatter_add(Dense dense, Sparse entries, bool int64_indices) {
    with_entries(dense.type, entries, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using Format = decltype(format);
        auto* bits = static_cast<typename Format::Bits*>(dense.data);
        for (size_t i = 0; i < entries.count; i++) add_to<Format>(bits[index[i]], value[i]);
    });
}

void scatter_add_where(Dense dense, Sparse entries, const void* others, size_t other_count, bool int64_indices, bool present) {
    with_entries(dense.type, entries, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using Format = decltype(format);
        auto* bits = static_cast<typename Format::Bits*>(dense.data);
        each_where(index, entries.count, static_cast<decltype(index)>(others), other_count, present,
                   [&](size_t i) { add_to<Format>(bits[index[i]], value[i]); });
    });
}

bool densify(Dense dense, Sparse entries, bool int64_indices, int threads) {
    bool good = false;
    with_entries(dense.type, entries, int64_indices,
                 [&](const auto* index, const auto*, auto) { good = all_below(index, entries.count, dense.size); });
    if (!good) return false;
    const size_t width = with_format(dense.type, [](auto format) { return sizeof(typename decltype(format)::Bits); });
    ranges(dense.size, threads, [&](size_t begin, size_t end) {
        std::memset(static_cast<char*>(dense.data) + begin * width, 0, (end - begin) * width);
    });
    with_entries(dense.type, entries, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using Format = decltype(format);
        auto* bits = static_cast<typename Format::Bits*>(dense.data);
        for (size_t i = 0; i < entries.count; i++) bits[index[i]] = Format::narrow(value[i]);
    });
    return true;
}

void widen(Dense x, const Dense* r, void* out, int threads) {
    with_format(x.type, [&](auto format) {
        using X = decltype(format);
        using Accumulator = typename X::Accumulator;
        const auto* from = static_cast<const typename X::Bits*>(x.data);
        auto* to = static_cast<Accumulator*>(out);
        ranges(x.size, threads, [&](size_t begin, size_t end) {
            if (!r) {
                for (size_t i = begin; i < end; i++) to[i] = X::widen(from[i]);
            } else if (r->type == x.type) {  // rounded to the residual's type, as in selection
                const auto* old = static_cast<const typename X::Bits*>(r->data);
                for (size_t i = begin; i < end; i++) to[i] = X::widen(X::narrow(X::widen(old[i]) + X::widen(from[i])));
            } else {
                const auto* old = static_cast<const Accumulator*>(r->data);
                for (size_t i = begin; i < end; i++) to[i] = old[i] + X::widen(from[i]);
            }
        });
    });
}

bool add_difference(const void* from, Dense x, double decay, bool if_finite, void* r, int threads) {
    return with_format(x.type, [&](auto format) {
        using X = decltype(format);
        using Accumulator = typename X::Accumulator;
        using Bits = std::conditional_t<sizeof(Accumulator) == 8, F64, F32>;
        const auto* minuend = static_cast<const Accumulator*>(from);
        const auto* subtrahend = static_cast<const typename X::Bits*>(x.data);
        auto* sum = static_cast<Accumulator*>(r);
        const auto factor = Accumulator(decay);
        std::atomic<bool> finite{true};
        if (if_finite) {
            ranges(x.size, threads, [&](size_t begin, size_t end) {
                using Word = typename Bits::Bits;
                Word beyond = 0;
                for (size_t i = begin; i < end; i++)
                    beyond |= Word(magnitude(bit_cast<Word>(minuend[i] - X::widen(subtrahend[i]))) >= Bits::infinity);
                if (beyond) finite = false;
            });
        }
        if (!finite) return false;
        ranges(x.size, threads, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) sum[i] = factor * sum[i] + (minuend[i] - X::widen(subtrahend[i]));
        });
        return true;
    });
}

void mix(Dense x, double weight, const void* values, int threads) {
    with_format(x.type, [&](auto format) {
        using X = decltype(format);
        using Accumulator = typename X::Accumulator;
        auto* one = static_cast<typename X::Bits*>(x.data);
        const auto* other = static_cast<const Accumulator*>(values);
        const auto weight_of_one = Accumulator(weight), weight_of_other = Accumulator(1 - weight);
        ranges(x.size, threads, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++)
                one[i] = X::narrow(weight_of_one * X::widen(one[i]) + weight_of_other * other[i]);
        });
    });
}

void add(void* sum, const void* addend, size_t size, bool float64_values, int threads) {
    const auto run = [&](auto* to, const auto* from) {
        ranges(size, threads, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) to[i] += from[i];
        });
    };
    if (float64_values)
        run(static_cast<double*>(sum), static_cast<const double*>(addend));
    else
        run(static_cast<float*>(sum), static_cast<const float*>(addend));
}

void narrow(const void* values, Dense dense, int threads) {
    with_format(dense.type, [&](auto format) {
        using Format = decltype(format);
        const auto* from = static_cast<const typename Format::Accumulator*>(values);
        auto* to = static_cast<typename Format::Bits*>(dense.data);
        ranges(dense.size, threads, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) to[i] = Format::narrow(from[i]);
        });
    });
}

const char* simd_name() { return isa().name; }
bool use_simd(const char* name) { return use_isa(name); }

}  // namespace sparsecomm
