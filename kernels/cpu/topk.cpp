// Exact top-k in one pass: a sample gives a threshold that is most likely just below the k-th magnitude; one filtering
// pass keeps what reaches it; an exact selection among those candidates gives the answer. The sample decides only how
// long it takes: a part with too many candidates drops those that cannot win and raises its threshold; too few candidates
// and the pass is made again with every non-zero a candidate.
#include <cmath>

#include "rank_select.hpp"
#include "scan.hpp"

namespace sparsecomm {

namespace {

#include "sources.inl"

// Tuning, measured on Zen 5 (bench/figures.py).
constexpr size_t SAMPLE = size_t(1) << 16;  // elements sampled at most
constexpr size_t SAMPLE_STRIDE = 16;         // and at most one in so many
constexpr size_t LINE = 16;                 // neighbours sampled together: a cache line of floats
constexpr size_t AHEAD_LINES = 24;          // lines asked for before they are needed
constexpr size_t SAMPLE_FROM = 4096;        // below so many elements everything is a candidate
constexpr double CROWDED = 0.004;           // fraction of candidates above which most groups of 64 hold one
constexpr size_t SLACK = 8192;              // room for candidates beyond 2k

template <class Bits>
struct Edges {
    Bits threshold;     // most likely at least k elements reach it
    Bits top;      // most likely fewer than k elements reach it
    bool crowded;
};

// Strata of equal length, one line at a random position in each: layers differ in scale, so position matters.
template <class S>
Edges<typename S::Bits> sample(const S& s, size_t n, size_t k, typename S::Bits infinity) {
    using Bits = typename S::Bits;
    Edges<Bits> thresholds{1, Bits(infinity + 1), true};
    if (n < SAMPLE_FROM) return thresholds;
    const size_t lines = std::min(SAMPLE, n / SAMPLE_STRIDE) / LINE, size = lines * LINE, stride = n / lines;
    const double expected = double(size) * double(k) / double(n), spread = 5 * std::sqrt(expected) + 5;
    if (expected + spread >= double(size)) return thresholds;
    const Select<Bits> loops = select_loops(Bits());
    Buffer<Bits> keys(size + 16), copy(size + 16);
    Buffer<size_t> starts(lines + AHEAD_LINES);
    uint64_t state = 0x9e3779b97f4a7c15ull;
    for (size_t line = 0; line < lines; line++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        starts[line] = line * stride + size_t((state >> 33) % (stride - LINE + 1));
    }
    std::fill_n(starts.get() + lines, AHEAD_LINES, starts[lines - 1]);
    for (size_t line = 0; line < lines; line++) {
        s.touch(starts[line + AHEAD_LINES]);
        for (size_t j = 0; j < LINE; j++) keys[line * LINE + j] = key_of(s.peek(starts[line] + j), infinity);
    }
    std::copy_n(keys.get(), size, copy.get());
    thresholds.threshold = std::max<Bits>(1, kth_largest(copy.get(), size, size_t(expected + spread), loops).key);
    if (expected > spread) thresholds.top = std::max(thresholds.threshold, kth_largest(keys.get(), size, size_t(expected - spread), loops).key);
    thresholds.crowded = (expected + spread) / double(size) > CROWDED;
    return thresholds;
}

template <class Format>
class TopK {
  public:
    using Bits = typename Format::Bits;

    TopK(Source<Bits> s, size_t n, size_t k, int threads)
        : source_(s), k_(k), threads_(threads), parts_(make_parts<Bits>(n, threads)), scratch_(parts_.size()) {
        size_t capacity = 0;  // all scratch is taken here, before anything is written
        for (size_t p = 0; p < parts_.size(); p++) {
            parts_[p].reserve(std::min(parts_[p].end - parts_[p].begin + 64, 2 * k + SLACK) + 64);
            scratch_[p] = {Buffer<Bits>(parts_[p].capacity + 64), Buffer<uint32_t>(parts_[p].capacity + 64)};
            capacity += parts_[p].capacity;
        }
        keys_ = Buffer<Bits>(capacity + 64);
    }

    size_t run(Edges<Bits> thresholds, bool int64_indices, void* indices, void* values) {
        scan(source_, thresholds.threshold, thresholds.crowded);
        bool taken = source_.r != nullptr;  // candidates are zero in the residual
        if (total() < k_ && thresholds.threshold > 1) {
            if (taken) each([&](size_t p) { put_back(p, parts_[p].index.get(), parts_[p].bits.get(), parts_[p].count); });
            taken = false;
            thresholds.top = Bits(Format::infinity + 1);
            scan(plain(), 1, true);
        }
        const bool clear = source_.r && !taken;  // winners are still in the residual
        const bool direct = sizeof(Bits) == sizeof(typename Format::Accumulator) && !int64_indices && !clear;
        if (total() > k_) {
            keep_best(thresholds.top, taken, direct ? static_cast<uint32_t*>(indices) : nullptr, static_cast<Bits*>(values));
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
    struct Scratch {
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

    // The sums in the residual, once they are there; or x.
    Source<Bits> plain() const { return {plain_filter(Bits()), source_.r ? source_.r : source_.x, nullptr}; }

    void put_back(size_t p, const uint32_t* index, const Bits* bits, size_t count) {
        restore<Format>(source_.r, parts_[p].begin, index, bits, count);
    }

    void scan(const Source<Bits>& s, Bits threshold, bool crowded) {
        each([&](size_t p) {
            parts_[p].count = 0;
            parts_[p].threshold = threshold;
            collect(s, parts_[p], crowded, [&](Part<Bits>& part) {
                // Full: its own k best are all that can win, and a later entry must beat the last of them.
                Bits* keys = scratch_[p].bits.get();
                for (size_t i = 0; i < part.count; i++) keys[i] = key_of(part.bits[i], Format::infinity);
                const auto kth = kth_largest(keys, part.count, k_, loops_);
                keep(p, kth, k_, s.r != nullptr);
                part.threshold = above(kth.key, Format::infinity);
            });
        });
    }

    // Of part p keep `room` entries: those above kth, and the first ties equal to it. In place, or at index and bits.
    void keep(size_t p, Kth<Bits> kth, size_t room, bool taken, uint32_t* index = nullptr, Bits* bits = nullptr) {
        Part<Bits>& part = parts_[p];
        Scratch& lost = scratch_[p];
        const Limit<Bits> limit{kth.key, Format::infinity, Format::nan, kth.ties};
        const Kept<Bits> kept = index ? Kept<Bits>{index, bits, room, uint32_t(part.begin)}
                                      : Kept<Bits>{part.index.get(), part.bits.get(), room, 0};
        loops_.split(part.index.get(), part.bits.get(), part.count, limit, kept, taken ? lost.index.get() : nullptr,
                     taken ? lost.bits.get() : nullptr);
        if (taken) put_back(p, lost.index.get(), lost.bits.get(), part.count - room);
        part.count = room;
    }

    // Of all candidates keep the k best, in place or at index and bits.
    void keep_best(Bits top, bool taken, uint32_t* index, Bits* bits) {
        Kth<Bits> kth = find_kth(top);
        std::vector<size_t> larger(parts_.size()), equal(parts_.size());
        each([&](size_t p) {
            const Part<Bits>& part = parts_[p];
            larger[p] = loops_.reaching(part.bits.get(), part.count, above(kth.key, Format::infinity));
            equal[p] = loops_.reaching(part.bits.get(), part.count, kth.key) - larger[p];
        });
        // Equal keys win in order of index: the parts before take theirs first.
        std::vector<size_t> start(parts_.size() + 1);
        for (size_t p = 0; p < parts_.size(); p++) {
            equal[p] = std::min(equal[p], kth.ties);
            kth.ties -= equal[p];
            start[p + 1] = start[p] + larger[p] + equal[p];
        }
        each([&](size_t p) {
            const size_t room = start[p + 1] - start[p];
            if (index)
                keep(p, {kth.key, equal[p]}, room, taken, index + start[p], bits + start[p]);
            else
                keep(p, {kth.key, equal[p]}, room, taken);
        });
    }

    // The k-th of all candidates. Most of them lie above `top` and need no closer look.
    Kth<Bits> find_kth(Bits top) {
        std::vector<size_t> close(parts_.size());
        each([&](size_t p) {
            close[p] = loops_.between(parts_[p].bits.get(), parts_[p].count, 0, top, scratch_[p].bits.get());
        });
        size_t near = 0;
        for (size_t c : close) near += c;
        const size_t sure = total() - near;
        const bool bracketed = sure < k_;  // else the sample's upper threshold was too low: look at every candidate
        size_t o = 0;
        for (size_t p = 0; p < parts_.size(); p++) {
            if (bracketed)
                o = size_t(std::copy_n(scratch_[p].bits.get(), close[p], keys_.get() + o) - keys_.get());
            else
                for (size_t i = 0; i < parts_[p].count; i++) keys_[o++] = key_of(parts_[p].bits[i], Format::infinity);
        }
        return kth_largest(keys_.get(), o, bracketed ? k_ - sure : k_, loops_);
    }

    Source<Bits> source_;
    const Select<Bits> loops_ = select_loops(Bits());
    size_t k_;
    int threads_;
    std::vector<Part<Bits>> parts_;
    std::vector<Scratch> scratch_;
    Buffer<Bits> keys_;
};

template <class X, class R>
size_t run(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads) {
    using Bits = typename R::Bits;
    TopK<R> select(source(R{}, x, r), x.size, k, threads);
    const auto thresholds = r ? sample(Fused<X, R>(x.data, r->data), x.size, k, R::infinity)
                         : sample(Plain<Bits>(x.data, nullptr), x.size, k, R::infinity);
    return select.run(thresholds, int64_indices, indices, values);
}

}  // namespace

size_t topk(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads) {
    k = std::min(k, x.size);
    if (k == 0) return 0;
    const Type stored = r ? r->type : x.type;
    return with_format(x.type, [&](auto format) -> size_t {
        using X = decltype(format);
        if constexpr (sizeof(typename X::Bits) == 2)
            if (stored == Type::f32) return run<X, F32>(x, r, k, int64_indices, indices, values, threads);
        return run<X, X>(x, r, k, int64_indices, indices, values, threads);
    });
}

}  // namespace sparsecomm
