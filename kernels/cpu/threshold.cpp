// Every entry that reaches a threshold, in one pass; the number is known only afterwards.
#include <memory>
#include <new>

#include "scan.hpp"

namespace sparsecomm {

struct Collected {
    virtual ~Collected() = default;
    virtual void write(bool wide, void* indices, void* values) = 0;
};

namespace {

// The least key whose value is at least tau (tau >= 0, not NaN); at least 1, as zeros are never selected.
template <class Format>
typename Format::Bits edge_for(double tau) {
    using Bits = typename Format::Bits;
    using Carrier = typename Format::Carrier;
    Bits edge = magnitude(Format::narrow(Carrier(tau)));
    while (edge <= Format::infinity && double(Format::widen(edge)) < tau) edge++;
    while (edge > 0 && edge <= Format::infinity && double(Format::widen(Bits(edge - 1))) >= tau) edge--;
    return std::max<Bits>(1, edge);
}

template <class Format>
struct CollectedParts final : Collected {
    using Bits = typename Format::Bits;
    std::vector<Part<Bits>> parts;
    int threads;

    CollectedParts(const Source<Bits>& s, size_t n, double tau, int threads_)
        : parts(make_parts<Bits>(n, threads_)), threads(threads_) {
        constexpr size_t FIRST = size_t(1) << 14;
        for (auto& part : parts) {
            part.edge = edge_for<Format>(tau);
            part.reserve(std::min(part.end - part.begin, FIRST) + 128);
        }
        std::vector<char> failed(parts.size());
        parallel(parts.size(), threads, [&](size_t p) {
            collect(s, parts[p], false, [&](Part<Bits>& part) { failed[p] |= !grow(s, part); });
        });
        if (std::count(failed.begin(), failed.end(), 0) == long(parts.size())) return;
        if (s.r)
            for (size_t p = 0; p < parts.size(); p++) give_back(s, parts[p]);
        throw std::bad_alloc();
    }

    // Room for more; without memory, go on accumulating and take nothing.
    static bool grow(const Source<Bits>& s, Part<Bits>& part) {
        try {
            part.reserve(std::min(part.capacity * 2, part.end - part.begin + 128));
            return true;
        } catch (const std::bad_alloc&) {
            if (s.r) give_back(s, part);
            part.count = 0;
            part.edge = Bits(magnitude_mask<Bits> + 1);
            return false;
        }
    }

    static void give_back(const Source<Bits>& s, Part<Bits>& part) {
        restore<Format>(s.r, part.begin, part.index.get(), part.bits.get(), part.count);
    }

    void write(bool wide, void* indices, void* values) override { write_all<Format>(parts, wide, indices, values, threads); }
};

}  // namespace

Collected* threshold_collect(Dense x, Dense* r, double tau, int threads, size_t* count) {
    return with_format(r ? r->type : x.type, [&](auto format) -> Collected* {
        using Format = decltype(format);
        auto made = std::make_unique<CollectedParts<Format>>(source(Format{}, x, r), x.size, tau, threads);
        *count = 0;
        for (const auto& part : made->parts) *count += part.count;
        return made.release();
    });
}

void threshold_write(Collected* collected, bool wide, void* indices, void* values) {
    const std::unique_ptr<Collected> owned(collected);
    owned->write(wide, indices, values);
}

void threshold_free(Collected* collected) { delete collected; }

}  // namespace sparsecomm
