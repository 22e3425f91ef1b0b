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

// Returns whether all elements of x times a factor, and their squares, are certainly finite.
template <class X>
bool quotients_are_finite(const typename X::Bits* x, size_t size, double factor, double scale, int threads) {
    constexpr double MAX = 0.5 * double(std::numeric_limits<typename X::Accumulator>::max());
    const double largest = double(X::widen(largest_of<X>(x, size, threads)));
    return largest * factor < MAX && largest * scale < std::sqrt(MAX);  // false for NaN
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
        const double of_scale = std::abs(double(factor));
        const double of_quotient = of_scale / double(std::numeric_limits<Accumulator>::min());  // the smallest unit
        if (if_finite && !quotients_are_finite<X>(dividend, x.size, of_quotient, of_scale, threads)) {
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

void adamw(Dense weights, Moments moments, const void* exponents, Sparse means, bool int64_indices, const void* rows,
           size_t count, double eps, int32_t step, void* const to[3], int threads) {
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
        const auto tiny = Accumulator(eps);
        Accumulator* new_value[3];
        for (int a = 0; a < 3; a++) new_value[a] = static_cast<Accumulator*>(to[a]);
        const auto row_of = [=](int32_t last) {
            const int64_t passed = int64_t(step) - last;
            return row + 6 * (passed < 0 ? 0 : size_t(passed) < count ? size_t(passed) : count - 1);
        };
        ranges(means.count, threads, [&](size_t begin, size_t end) {
            Block block{};
            for (size_t from = begin; from < end; from += Block::SIZE) {
                const size_t size = std::min(end - from, size_t(Block::SIZE));
                const auto element = [=](size_t j) { return index ? size_t(index[from + j]) : from + j; };
                const int32_t first = moments.last[element(0)];
                int32_t differ = 0;
                for (size_t j = 0; j < size; j++) {
                    const size_t i = element(j);
                    differ |= moments.last[i] ^ first;
                    block.weight[j] = kept ? W::widen(weight[i]) + kept[i] : W::widen(weight[i]);
                    block.mean[j] = mean[i];
                    block.square[j] = square[i];
                    block.gradient[j] = value[from + j] * unit_of<Accumulator>(exponent[i]);
                }
                for (size_t j = 0; j < size; j++) {
                    const Accumulator* of = row_of(differ ? moments.last[element(j)] : first);
                    for (size_t c = 0; c < 6; c++) block.row[c][j] = of[c];
                }
                adamw_of(Accumulator())(block, tiny);
                std::copy_n(block.weight, size, new_value[0] + from);
                std::copy_n(block.mean, size, new_value[1] + from);
                std::copy_n(block.square, size, new_value[2] + from);
            }
        });
    });
}

}  // namespace sparsecomm
