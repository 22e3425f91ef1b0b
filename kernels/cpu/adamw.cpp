// AdamW for the sums of an exchange, which may contain only a few of the weights.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "dense.hpp"
#include "isa.hpp"
#include "scan.hpp"

namespace sparsecomm {

namespace {

// Raises a maximum to a value if that is larger; NaN never is.
template <class T>
void raise(std::atomic<T>& maximum, T value) {
    T seen = maximum;
    while (value > seen && !maximum.compare_exchange_weak(seen, value)) {}
}

// Returns the bits of the largest magnitude; above infinity if there is a NaN.
template <class X>
typename X::Bits largest_of(const typename X::Bits* x, size_t size, int threads) {
    using Signed = std::make_signed_t<typename X::Bits>;
    std::atomic<Signed> largest{0};
    ranges(size, threads, [&](size_t begin, size_t end) {
        raise(largest, Signed(select_loops(typename X::Bits()).largest(x + begin, end - begin)));
    });
    return typename X::Bits(largest.load());
}

template <class Accumulator>
Accumulator smallest_unit(const UnitExponent<Accumulator>* exponents, size_t size, int threads) {
    std::atomic<int32_t> highest{INT32_MIN};
    ranges(size, threads, [&](size_t begin, size_t end) {
        const auto* exponent = exponents;
        auto lowest = exponent[begin];
        for (size_t i = begin; i < end; i++) lowest = exponent[i] < lowest ? exponent[i] : lowest;
        raise(highest, -int32_t(lowest));
    });
    return unit_of<Accumulator>(UnitExponent<Accumulator>(-highest));
}

// Returns whether all quotients x * scale / unit, and the squares of x * scale, are certainly finite.
template <class X, class Accumulator = typename X::Accumulator>
bool quotients_are_finite(const typename X::Bits* x, const UnitExponent<Accumulator>* exponents, double scale, size_t size,
                          int threads) {
    constexpr double MAX = 0.5 * double(std::numeric_limits<Accumulator>::max());
    const double largest = scale * double(X::widen(largest_of<X>(x, size, threads)));
    if (!(largest < std::sqrt(MAX))) return false;  // also if it is NaN
    return largest < MAX * double(std::numeric_limits<Accumulator>::min()) ||
           largest < MAX * double(smallest_unit<Accumulator>(exponents, size, threads));
}

Quotients<F32, float> quotients_of(F32) { return isa().quotients32; }
Quotients<F16, float> quotients_of(F16) { return isa().quotients16; }
Quotients<BF16, float> quotients_of(BF16) { return isa().quotients_bf16; }
Quotients<F64, double> quotients_of(F64) { return isa().quotients64; }

AdamWStep<float> adamw_of(float) { return isa().adamw32; }
AdamWStep<double> adamw_of(double) { return isa().adamw64; }

}  // namespace

bool add_quotient(Dense x, const void* exponents, double scale, bool if_finite, void* r, int threads) {
    return with_format(x.type, [&](auto format) {
        using X = decltype(format);
        using Accumulator = typename X::Accumulator;
        using Bits = std::conditional_t<sizeof(Accumulator) == 8, F64, F32>;
        const auto* dividend = static_cast<const typename X::Bits*>(x.data);
        const auto* exponent = static_cast<const UnitExponent<Accumulator>*>(exponents);
        auto* sum = static_cast<Accumulator*>(r);
        const auto factor = Accumulator(scale);
        std::atomic<bool> finite{true};
        if (if_finite && !quotients_are_finite<X>(dividend, exponent, std::abs(double(factor)), x.size, threads)) {
            ranges(x.size, threads, [&](size_t begin, size_t end) {
                using Word = typename Bits::Bits;
                Word beyond = 0;
                for (size_t i = begin; i < end; i++) {
                    const Accumulator scaled = factor * X::widen(dividend[i]);
                    beyond |= Word(magnitude(bit_cast<Word>(scaled / unit_of<Accumulator>(exponent[i]))) >= Bits::infinity);
                    beyond |= Word(magnitude(bit_cast<Word>(scaled * scaled)) >= Bits::infinity);
                }
                if (beyond) finite = false;
            });
        }
        if (!finite) return false;
        ranges(x.size, threads, [&](size_t begin, size_t end) {
            quotients_of(X())(dividend + begin, exponent + begin, factor, sum + begin, end - begin);
        });
        return true;
    });
}

double largest(Dense x, int threads) {
    return with_format(x.type, [&](auto format) {
        using X = decltype(format);
        return double(X::widen(largest_of<X>(static_cast<const typename X::Bits*>(x.data), x.size, threads)));
    });
}

size_t adamw(Dense weights, Moments moments, const void* exponents, Sparse means, bool int64_indices, const void* rows,
             size_t count, double unit_eps, double eps, double limit, double margin, int32_t step, AdamWResults to, int threads) {
    std::atomic<size_t> overflows{0};
    with_entries(weights.type, means, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using W = decltype(format);
        using Accumulator = typename W::Accumulator;
        using Block = AdamWBlock<Accumulator>;
        const auto* weight = static_cast<const typename W::Bits*>(weights.data);
        const auto* mean = static_cast<const Accumulator*>(moments.mean);
        const auto* square = static_cast<const Accumulator*>(moments.squares);
        const auto* kept = static_cast<const Accumulator*>(moments.compensation);
        const auto* exponent = static_cast<const UnitExponent<Accumulator>*>(exponents);
        const auto* row = static_cast<const Accumulator*>(rows);
        const AdamWLimits<Accumulator> limits{Accumulator(eps), Accumulator(unit_eps), Accumulator(limit), Accumulator(margin)};
        auto *new_weight = static_cast<Accumulator*>(to.weights), *new_mean = static_cast<Accumulator*>(to.mean);
        auto *new_square = static_cast<Accumulator*>(to.squares), *change = static_cast<Accumulator*>(to.changes);
        ranges(means.count, threads, [&](size_t begin, size_t end) {
            Block block{};
            size_t found = 0;
            for (size_t from = begin; from < end; from += Block::SIZE) {
                const size_t size = std::min(end - from, size_t(Block::SIZE));
                for (size_t e = from + Block::SIZE; index && e < std::min(end, from + 2 * Block::SIZE); e++) {
                    __builtin_prefetch(weight + index[e], 0, 2);
                    __builtin_prefetch(mean + index[e], 0, 2);
                    __builtin_prefetch(square + index[e], 0, 2);
                    __builtin_prefetch(moments.last + index[e], 0, 2);
                    __builtin_prefetch(exponent + index[e], 0, 2);
                    if (kept) __builtin_prefetch(kept + index[e], 0, 2);
                }
                const auto take = [=](const auto* of, auto* to, auto convert) {
                    if (index)
                        for (size_t j = 0; j < size; j++) to[j] = convert(of[index[from + j]]);
                    else
                        for (size_t j = 0; j < size; j++) to[j] = convert(of[from + j]);
                };
                const auto same = [](auto x) { return x; };
                take(weight, block.before, [](auto bits) { return W::widen(bits); });
                take(mean, block.mean, same);
                take(square, block.square, same);
                take(moments.last, block.last, same);
                take(exponent, block.exponent, same);
                if (kept) {
                    take(kept, block.weight, same);
                    for (size_t j = 0; j < size; j++) block.weight[j] = block.before[j] + block.weight[j];
                } else {
                    std::copy_n(block.before, size, block.weight);
                }
                std::copy_n(value + from, size, block.gradient);
                const bool together = std::all_of(block.last, block.last + size, [&](int32_t last) { return last == block.last[0]; });
                for (size_t j = 0; j < size; j++) {
                    const Accumulator* of = row + 6 * row_of(step, block.last[together ? 0 : j], count);
                    for (size_t c = 0; c < 6; c++) block.row[c][j] = of[c];
                }
                adamw_of(Accumulator())(block, limits);
                std::copy_n(block.weight, size, new_weight + from);
                std::copy_n(block.mean, size, new_mean + from);
                std::copy_n(block.square, size, new_square + from);
                if (change) std::copy_n(block.change, size, change + from);
                for (size_t j = 0; j < size; j++) {
                    to.jumps[from + j] = int8_t(block.jump[j]);
                    found += block.jump[j] == OVERFLOWS;
                }
            }
            overflows += found;
        });
    });
    return overflows;
}

void store_adamw(Dense weights, Moments moments, void* exponents, Sparse indices, bool int64_indices, AdamWResults from,
                 int32_t step, bool write, int threads) {
    with_entries(weights.type, indices, int64_indices, [&](const auto* index, const auto*, auto format) {
        using W = decltype(format);
        using Accumulator = typename W::Accumulator;
        auto* weight = static_cast<typename W::Bits*>(weights.data);
        auto *mean = static_cast<Accumulator*>(moments.mean), *square = static_cast<Accumulator*>(moments.squares);
        auto* kept = static_cast<Accumulator*>(moments.compensation);
        const auto *new_weight = static_cast<const Accumulator*>(from.weights), *new_mean = static_cast<const Accumulator*>(from.mean);
        const auto *new_square = static_cast<const Accumulator*>(from.squares), *change = static_cast<const Accumulator*>(from.changes);
        auto* exponent = static_cast<UnitExponent<Accumulator>*>(exponents);
        ranges(indices.count, threads, [=](size_t begin, size_t end) {
            constexpr size_t AHEAD = 64;  // entries prefetched
            for (size_t e = begin; e < end; e++) {
                const size_t i = index ? size_t(index[e]) : e;
                if (index && e + AHEAD < end) {
                    const auto next = index[e + AHEAD];
                    __builtin_prefetch(weight + next, 1, 2);
                    __builtin_prefetch(mean + next, 1, 2);
                    __builtin_prefetch(square + next, 1, 2);
                    __builtin_prefetch(moments.last + next, 1, 2);
                    if (kept) __builtin_prefetch(kept + next, 1, 2);
                    if (exponent) __builtin_prefetch(exponent + next, 1, 2);
                }
                if (write) weight[i] = canonical<W>(W::narrow(new_weight[e]));
                if (kept) kept[i] = compensation_of(new_weight[e], W::widen(weight[i]));
                mean[i] = new_mean[e];
                square[i] = new_square[e];
                moments.last[i] = step;
                if (exponent) exponent[i] = jumped<Accumulator>(exponent[i], change[e] != 0 ? from.jumps[e] : 0);
            }
        });
    });
}

void change_units(Dense r, void* exponents, Sparse changes, bool int64_indices) {
    with_entries(r.type, changes, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using Accumulator = typename decltype(format)::Accumulator;
        if constexpr (sizeof(Accumulator) == sizeof(typename decltype(format)::Bits)) {
            constexpr size_t AHEAD = 64;  // entries prefetched
            auto* residual = static_cast<Accumulator*>(r.data);
            auto* exponent = static_cast<UnitExponent<Accumulator>*>(exponents);
            for (size_t e = 0; e < changes.count; e++) {
                if (e + AHEAD < changes.count) {
                    __builtin_prefetch(exponent + index[e + AHEAD], 1, 2);
                    __builtin_prefetch(residual + index[e + AHEAD], 1, 2);
                }
                change_unit(residual[index[e]], exponent[index[e]], value[e]);
            }
        }
    });
}

}  // namespace sparsecomm
