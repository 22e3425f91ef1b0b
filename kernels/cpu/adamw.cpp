// AdamW for sparse updates: each step changes only a few of the weights.
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

#include "adamw.inl"

}  // namespace

bool add_quotient(Dense x, const void* squares, double eps, double scale, bool if_finite, void* r, int threads) {
    return with_format(x.type, [&](auto format) {
        using X = decltype(format);
        using Accumulator = typename X::Accumulator;
        using Bits = std::conditional_t<sizeof(Accumulator) == 8, F64, F32>;
        const auto* dividend = static_cast<const typename X::Bits*>(x.data);
        const auto* square = static_cast<const Accumulator*>(squares);
        auto* sum = static_cast<Accumulator*>(r);
        const auto tiny = Accumulator(eps), factor = Accumulator(scale);
        const auto quotient = [&](size_t i) { return factor * X::widen(dividend[i]) / floor_power_of_two(std::sqrt(square[i]) + tiny); };
        std::atomic<bool> finite{true};
        const double of_scale = std::abs(double(factor)), of_quotient = of_scale / double(floor_power_of_two(tiny));
        if (if_finite && !quotients_are_finite<X>(dividend, x.size, of_quotient, of_scale, threads)) {
            ranges(x.size, threads, [&](size_t begin, size_t end) {
                using Word = typename Bits::Bits;
                Word beyond = 0;
                for (size_t i = begin; i < end; i++) {
                    const Accumulator scaled = factor * X::widen(dividend[i]);
                    beyond |= Word(magnitude(bit_cast<Word>(quotient(i))) >= Bits::infinity);
                    beyond |= Word(magnitude(bit_cast<Word>(scaled * scaled)) >= Bits::infinity);
                }
                if (beyond) finite = false;
            });
        }
        if (!finite) return false;
        ranges(x.size, threads, [&](size_t begin, size_t end) {
            quotients_of(X())(dividend + begin, square + begin, factor, tiny, sum + begin, end - begin);
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

void adamw(Dense weights, Moments moments, void* residual, Sparse means, bool int64_indices, const void* rows, size_t count,
           double unit_eps, double eps, int32_t step, int threads) {
    with_entries(weights.type, means, int64_indices, [&](const auto* index, const auto* value, auto format) {
        using W = decltype(format);
        using Accumulator = typename W::Accumulator;
        auto* weight = static_cast<typename W::Bits*>(weights.data);
        auto* mean = static_cast<Accumulator*>(moments.mean);
        auto* square = static_cast<Accumulator*>(moments.squares);
        auto* unsent = static_cast<Accumulator*>(residual);
        auto* last = moments.last;
        const auto* row = static_cast<const Accumulator*>(rows);
        const auto unit_tiny = Accumulator(unit_eps), tiny = Accumulator(eps);
        const auto row_of = [=](size_t i) {
            const int64_t passed = int64_t(step) - last[i];
            return row + 6 * (passed < 0 ? 0 : size_t(passed) < count ? size_t(passed) : count - 1);
        };
        if (!index) {
            ranges(means.count, threads, [=](size_t begin, size_t end) {
                using Block = AdamWBlock<Accumulator>;
                Block block{};
                const auto update = [&](size_t from, size_t size) {
                    int32_t differ = 0;
                    for (size_t j = 0; j < size; j++) differ |= last[from + j] ^ last[from];
                    for (size_t c = 0; c < 6; c++)
                        if (differ)
                            for (size_t j = 0; j < size; j++) block.row[c][j] = row_of(from + j)[c];
                        else
                            std::fill_n(block.row[c], Block::SIZE, row_of(from)[c]);
                    for (size_t j = 0; j < size; j++) block.weight[j] = W::widen(weight[from + j]);
                    std::copy_n(mean + from, size, block.mean);
                    std::copy_n(square + from, size, block.square);
                    std::copy_n(unsent + from, size, block.residual);
                    std::copy_n(value + from, size, block.quotient);
                    for (size_t j = 0; j < size; j++) block.carried[j] = last[from + j] || block.mean[j] != 0 ? square[from + j] : 0;
                    adamw_of(Accumulator())(block, unit_tiny, tiny);
                    for (size_t j = 0; j < size; j++) weight[from + j] = canonical<W>(W::narrow(block.weight[j]));
                    std::copy_n(block.mean, size, mean + from);
                    std::copy_n(block.square, size, square + from);
                    std::copy_n(block.residual, size, unsent + from);
                    std::fill_n(last + from, size, step);
                };
                size_t i = begin;
                for (; i + Block::SIZE <= end; i += Block::SIZE) update(i, Block::SIZE);
                if (i < end) update(i, end - i);
            });
            return;
        }
        // Memory latency dominates; more cache lines can be in flight to the second cache than to the first.
        constexpr size_t AHEAD = 32;  // entries prefetched
        for (size_t e = 0; e < means.count; e++) {
            if (e + AHEAD < means.count) {
                const auto next = index[e + AHEAD];
                __builtin_prefetch(weight + next, 0, 2);
                __builtin_prefetch(mean + next, 0, 2);
                __builtin_prefetch(square + next, 0, 2);
                __builtin_prefetch(last + next, 0, 2);
                __builtin_prefetch(unsent + next, 0, 2);
            }
            const auto i = index[e];
            const Accumulator* of = row_of(i);
            Accumulator w = W::widen(weight[i]), m = mean[i], v = square[i];
            adamw_step<Accumulator>(w, m, v, value[e], last[i] || m != 0 ? v : 0, of[0], of[1], of[2], of[3], of[4], of[5], unit_tiny, tiny);
            if (const auto kept = unsent[i]; kept != 0) unsent[i] = in_new_unit<Accumulator>(kept, square[i], v, unit_tiny);
            mean[i] = m;
            square[i] = v;
            last[i] = step;
            weight[i] = canonical<W>(W::narrow(w));
        }
    });
}

}  // namespace sparsecomm
