// Helpers for kernels of dense vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "pool.hpp"

namespace sparsecomm {

// Calls f(indices, values, format of the dense type).
template <class F>
void with_entries(Type type, const Sparse& entries, bool int64_indices, F&& f) {
    with_format(type, [&](auto format) {
        using Accumulator = typename decltype(format)::Accumulator;
        const auto* values = static_cast<const Accumulator*>(entries.values);
        if (int64_indices)
            f(static_cast<const int64_t*>(entries.indices), values, format);
        else
            f(static_cast<const int32_t*>(entries.indices), values, format);
    });
}

// Calls f(begin, end) for ranges of [0, n), on several threads.
template <class F>
void ranges(size_t n, int threads, F&& f) {
    constexpr size_t GRAIN = size_t(1) << 18;  // minimum elements per thread
    const size_t parts = parts_for(n, GRAIN, threads);
    parallel(parts, threads, [&](size_t p) { f(n / parts * p, p + 1 < parts ? n / parts * (p + 1) : n); });
}

}  // namespace sparsecomm
