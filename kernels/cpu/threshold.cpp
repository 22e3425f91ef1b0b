// Selects every entry that reaches a threshold, in one pass; their number is known only afterwards.
#include <memory>
#include <new>

#include "scan.hpp"

namespace sparsecomm {

struct Collected {
    virtual ~Collected() = default;
    virtual void write(bool int64_indices, void* indices, void* values) = 0;
};

namespace {

#include "sources.inl"

// Tuning, measured on Zen 5.
constexpr size_t LOOKS = 4096;        // elements sampled to estimate how many reach the threshold
constexpr size_t SLACK = size_t(1) << 14;

// Estimates the fraction of elements that reach the threshold from a sample. Affects only the initial allocation.
template <class S>
double fraction_of(const S& s, size_t n, typename S::Bits threshold) {
    const size_t looks = std::min(n, LOOKS);
    size_t hits = 0;
    for (size_t i = 0; i < looks; i++) hits += magnitude(s.peek(n / looks * i)) >= threshold;
    return looks ? double(hits) / double(looks) : 0;
}

// Returns the smallest key whose value is at least tau (tau >= 0, not NaN); at least 1, because zeros are never selected.
template <class Format>
typename Format::Bits min_key(double tau) {
    using Bits = typename Format::Bits;
    using Accumulator = typename Format::Accumulator;
    Bits threshold = magnitude(Format::narrow(Accumulator(tau)));
    while (threshold <= Format::infinity && double(Format::widen(threshold)) < tau) threshold++;
    while (threshold > 0 && threshold <= Format::infinity && double(Format::widen(Bits(threshold - 1))) >= tau) threshold--;
    return std::max<Bits>(1, threshold);
}

template <class Format>
struct CollectedParts final : Collected {
    using Bits = typename Format::Bits;
    std::vector<Part<Bits>> parts;
    int threads;
    Scratch& scratch;

    CollectedParts(const Source<Bits>& s, size_t n, Bits threshold, double fraction, int threads_, Scratch& scratch_)
        : parts(make_parts<Bits>(n, threads_)), threads(threads_), scratch(scratch_) {
        for (auto& part : parts) {
            const size_t size = part.end - part.begin;
            part.threshold = threshold;
            part.reserve(scratch, std::min(size, size_t(1.1 * fraction * double(size)) + SLACK) + 128);
        }
        std::vector<char> failed(parts.size());
        parallel(parts.size(), threads, [&](size_t p) {
            collect(s, parts[p], [&](Part<Bits>& part) { failed[p] |= !grow(s, part); });
        });
        if (std::count(failed.begin(), failed.end(), 0) == long(parts.size())) return;
        if (s.r)
            for (size_t p = 0; p < parts.size(); p++) give_back(s, parts[p]);
        throw std::bad_alloc();
    }

    // Makes room for more; without memory, continue to accumulate but select nothing.
    bool grow(const Source<Bits>& s, Part<Bits>& part) {
        try {
            part.reserve(scratch, std::min(part.capacity * 2, part.end - part.begin + 128));
            return true;
        } catch (const std::bad_alloc&) {
            if (s.r) give_back(s, part);
            part.count = 0;
            part.threshold = Bits(magnitude_mask<Bits> + 1);
            return false;
        }
    }

    static void give_back(const Source<Bits>& s, Part<Bits>& part) {
        restore<Format>(s.r, part.begin, part.index.get(), part.bits.get(), part.count);
    }

    void write(bool int64_indices, void* indices, void* values) override { write_all<Format>(parts, int64_indices, indices, values, threads); }
};

}  // namespace

template <class X, class R>
static Collected* collect_all(const Dense& x, const Dense* r, double tau, int threads, size_t* count, Scratch& scratch) {
    const auto threshold = min_key<R>(tau);
    const double fraction = r ? fraction_of(Fused<X, R>(x.data, r->data), x.size, threshold)
                           : fraction_of(Plain<typename R::Bits>(x.data, nullptr), x.size, threshold);
    auto made = std::make_unique<CollectedParts<R>>(source(R{}, x, r), x.size, threshold, fraction, threads, scratch);
    *count = 0;
    for (const auto& part : made->parts) *count += part.count;
    return made.release();
}

Collected* threshold_collect(Dense x, Dense* r, double tau, int threads, size_t* count, Scratch& scratch) {
    return with_format(x.type, [&](auto format) -> Collected* {
        using X = decltype(format);
        if constexpr (sizeof(typename X::Bits) == 2)
            if (r && r->type == Type::f32) return collect_all<X, F32>(x, r, tau, threads, count, scratch);
        return collect_all<X, X>(x, r, tau, threads, count, scratch);
    });
}

void threshold_write(Collected* collected, bool int64_indices, void* indices, void* values) {
    const std::unique_ptr<Collected> owned(collected);
    owned->write(int64_indices, indices, values);
}

void threshold_free(Collected* collected) { delete collected; }

}  // namespace sparsecomm
