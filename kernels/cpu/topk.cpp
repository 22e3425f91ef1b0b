// Exact top-k in one pass. A sample gives a threshold that is likely just below the k-th magnitude. A filtering pass keeps
// the candidates that reach it, and an exact selection among them gives the answer. The sample affects only the time: a part
// with too many candidates drops those that cannot win and raises its threshold; with too few candidates, the pass is
// repeated with every nonzero element as a candidate.
#include <cmath>

#include "rank_select.hpp"
#include "scan.hpp"

namespace sparsecomm {

namespace {

#include "sources.inl"

// Tuning, measured on Zen 5 (bench/figures.py).
constexpr size_t SAMPLE = size_t(1) << 16;  // maximum elements sampled
constexpr size_t SAMPLE_STRIDE = 32;         // minimum elements per sampled element
constexpr size_t LINE = 16;                 // neighbors sampled together: a cache line of floats
constexpr size_t AHEAD_LINES = 24;          // lines prefetched
constexpr size_t SAMPLE_FROM = 4096;        // minimum elements for sampling
constexpr size_t SLACK = 8192;              // room for candidates beyond 2k

// Returns a threshold that likely at least k elements reach. Samples one line at a random position in each of many strata of
// equal length, because layers differ in scale.
template <class S>
typename S::Bits sample(const S& s, size_t n, size_t k, typename S::Bits infinity, Scratch& scratch) {
    using Bits = typename S::Bits;
    if (n < SAMPLE_FROM) return 1;
    const size_t lines = std::min(SAMPLE, n / SAMPLE_STRIDE) / LINE, size = lines * LINE, stride = n / lines;
    const double expected = double(size) * double(k) / double(n), rank = expected + 5 * std::sqrt(expected) + 5;
    if (rank >= double(size)) return 1;
    Buffer<Bits> bits(scratch, size + 16);
    const auto start = [&](size_t line) {
        return line * stride + size_t(uint64_t(line * 0x9e3779b97f4a7c15ull >> 32) * (stride - LINE + 1) >> 32);
    };
    for (size_t line = 0; line < lines; line++) {
        if (line + AHEAD_LINES < lines) s.touch(start(line + AHEAD_LINES));
        const size_t from = start(line);
        for (size_t j = 0; j < LINE; j++) bits[line * LINE + j] = s.peek(from + j);
    }
    return std::max<Bits>(1, kth_largest(bits.get(), size, size_t(rank), infinity, bits.get(), select_loops(Bits())).key);
}

template <class Format>
class TopK {
  public:
    using Bits = typename Format::Bits;

    TopK(Source<Bits> s, size_t n, size_t k, int threads, Scratch& scratch)
        : source_(s), k_(k), threads_(threads), parts_(make_parts<Bits>(n, threads)), lost_(parts_.size()) {
        size_t capacity = 0;  // allocate all scratch memory before writing
        for (size_t p = 0; p < parts_.size(); p++) {
            parts_[p].reserve(scratch, std::min(parts_[p].end - parts_[p].begin + 64, 2 * k + SLACK) + 64);
            lost_[p] = {Buffer<Bits>(scratch, parts_[p].capacity + 64), Buffer<uint32_t>(scratch, parts_[p].capacity + 64)};
            capacity += parts_[p].capacity;
        }
        if (parts_.size() > 1) together_ = Buffer<Bits>(scratch, capacity + 16);
    }

    size_t run(Bits threshold, bool int64_indices, void* indices, void* values) {
        scan(source_, threshold);
        bool taken = source_.r != nullptr;  // candidates are zero in the residual
        if (total() < k_ && threshold > 1) {
            if (taken) each([&](size_t p) { put_back(p, parts_[p].index.get(), parts_[p].bits.get(), parts_[p].count); });
            taken = false;
            scan(plain(), 1);
        }
        const bool clear = source_.r && !taken;  // winners are still in the residual
        const bool direct = sizeof(Bits) == sizeof(typename Format::Accumulator) && !int64_indices && !clear;
        if (total() > k_) {
            keep_best(taken, direct ? static_cast<uint32_t*>(indices) : nullptr, static_cast<Bits*>(values));
            if (direct) return k_;
        }
        write_all<Format>(parts_, int64_indices, indices, values, threads_);
        if (clear)
            each([&](size_t p) {
                for (size_t i = 0; i < parts_[p].count; i++) source_.r[parts_[p].begin + parts_[p].index[i]] = 0;
            });
        return total();
    }

  private:
    struct Lost {  // of a part: entries that are dropped, and room for selection
        Buffer<Bits> bits;
        Buffer<uint32_t> index;
    };

    template <class Work>
    void each(Work&& work) { parallel(parts_.size(), threads_, work); }

    size_t total() const {
        size_t sum = 0;
        for (const auto& part : parts_) sum += part.count;
        return sum;
    }

    // The sums in the residual after the first pass; else x.
    Source<Bits> plain() const { return {plain_filter(Bits()), source_.r ? source_.r : source_.x, nullptr}; }

    void put_back(size_t p, const uint32_t* index, const Bits* bits, size_t count) {
        restore<Format>(source_.r, parts_[p].begin, index, bits, count);
    }

    void scan(const Source<Bits>& s, Bits threshold) {
        each([&](size_t p) {
            parts_[p].count = 0;
            parts_[p].threshold = threshold;
            collect(s, parts_[p], [&](Part<Bits>& part) {
                // Full: only its k best can win, and a later entry must beat the last of them.
                const Kth<Bits> kth = kth_of(p);
                keep(p, kth, k_, s.r != nullptr);
                part.threshold = above(kth.key, Format::infinity);
            });
        });
    }

    Kth<Bits> kth_of(size_t p) {
        return kth_largest(parts_[p].bits.get(), parts_[p].count, k_, Format::infinity, lost_[p].bits.get(), loops_);
    }

    // Keeps `room` entries of part p: those above kth, and the first ties equal to it. In place, or at index and bits.
    void keep(size_t p, Kth<Bits> kth, size_t room, bool taken, uint32_t* index = nullptr, Bits* bits = nullptr) {
        Part<Bits>& part = parts_[p];
        const Lost& lost = lost_[p];
        const Limit<Bits> limit{kth.key, Format::infinity, Format::nan, kth.ties};
        const Kept<Bits> kept = index ? Kept<Bits>{index, bits, room, uint32_t(part.begin)}
                                      : Kept<Bits>{part.index.get(), part.bits.get(), room, 0};
        loops_.split(part.index.get(), part.bits.get(), part.count, limit, kept, taken ? lost.index.get() : nullptr,
                     taken ? lost.bits.get() : nullptr);
        if (taken) put_back(p, lost.index.get(), lost.bits.get(), part.count - room);
        part.count = room;
    }

    // Keeps the k best of all candidates, in place or at index and bits.
    void keep_best(bool taken, uint32_t* index, Bits* bits) {
        if (parts_.size() == 1) return keep(0, kth_of(0), k_, taken, index, bits);
        Bits* all = together_.get();
        Bits* end = all;
        for (const Part<Bits>& part : parts_) end = std::copy_n(part.bits.get(), part.count, end);
        Kth<Bits> kth = kth_largest(all, total(), k_, Format::infinity, all, loops_);
        // Equal keys win in the order of indices, so earlier parts come first.
        std::vector<size_t> equal(parts_.size()), start(parts_.size() + 1);
        for (size_t p = 0; p < parts_.size(); p++) {
            const Part<Bits>& part = parts_[p];
            const size_t larger = loops_.reaching(part.bits.get(), part.count, above(kth.key, Format::infinity));
            equal[p] = std::min(loops_.reaching(part.bits.get(), part.count, kth.key) - larger, kth.ties);
            kth.ties -= equal[p];
            start[p + 1] = start[p] + larger + equal[p];
        }
        each([&](size_t p) {
            const size_t room = start[p + 1] - start[p];
            if (index)
                keep(p, {kth.key, equal[p]}, room, taken, index + start[p], bits + start[p]);
            else
                keep(p, {kth.key, equal[p]}, room, taken);
        });
    }

    Source<Bits> source_;
    const Select<Bits> loops_ = select_loops(Bits());
    size_t k_;
    int threads_;
    std::vector<Part<Bits>> parts_;
    std::vector<Lost> lost_;
    Buffer<Bits> together_;  // of all parts
};

template <class X, class R>
size_t run(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch) {
    using Bits = typename R::Bits;
    TopK<R> select(source(R{}, x, r), x.size, k, threads, scratch);
    const Bits threshold = r ? sample(Fused<X, R>(x.data, r->data), x.size, k, R::infinity, scratch)
                             : sample(Plain<Bits>(x.data, nullptr), x.size, k, R::infinity, scratch);
    return select.run(threshold, int64_indices, indices, values);
}

}  // namespace

size_t topk(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch) {
    k = std::min(k, x.size);
    if (k == 0) return 0;
    const Type stored = r ? r->type : x.type;
    return with_format(x.type, [&](auto format) -> size_t {
        using X = decltype(format);
        if constexpr (sizeof(typename X::Bits) == 2)
            if (stored == Type::f32) return run<X, F32>(x, r, k, int64_indices, indices, values, threads, scratch);
        return run<X, X>(x, r, k, int64_indices, indices, values, threads, scratch);
    });
}

size_t take_topk(Dense x, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch) {
    k = std::min(k, x.size);
    if (k == 0) return 0;
    return with_format(x.type, [&](auto format) -> size_t {
        using X = decltype(format);
        using Bits = typename X::Bits;
        TopK<X> select({held_filter(Bits()), x.data, static_cast<Bits*>(x.data)}, x.size, k, threads, scratch);
        const Bits threshold = sample(Plain<Bits>(x.data, nullptr), x.size, k, X::infinity, scratch);
        return select.run(threshold, int64_indices, indices, values);
    });
}

}  // namespace sparsecomm
