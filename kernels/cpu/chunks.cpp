// Exact top-k of every chunk, in one pass. A chunk remains in the cache while its k largest elements are found. One loop
// computes the sums and finds the candidates, which reach a threshold guessed from the previous chunks. A search among the
// few candidates finds the k-th. One more loop splits them. The guess affects only the time: with fewer than k candidates
// the threshold is lowered, until every nonzero element is a candidate.
#include <cmath>

#include "rank_select.hpp"
#include "scan.hpp"

namespace sparsecomm {

namespace {

// Tuning, measured on Zen 5 (bench/figures.py). Does not change results.
constexpr size_t TILE = 4096;            // elements scanned before candidates may be dropped
constexpr size_t SLACK = 8192;           // room for candidates beyond 2k
constexpr size_t GRAIN = size_t(1) << 18;  // minimum elements per thread
constexpr size_t AHEAD = 8;              // candidates per prefetched line of the next chunk
constexpr size_t PREFETCH_UP_TO = 192;   // maximum candidates for which prefetching pays
constexpr size_t COUNT_UP_TO = 4096;     // maximum candidates for which counting from the guess is fastest
constexpr double MARGIN = 0.125;         // octaves by which the first guess is below the previous chunk's k-th
constexpr double LOWER = 4;              // margins by which the second guess is lower
constexpr double MISSED = 1.5;           // factor of the margin after a guess that was too high

template <class Bits>
struct Locator {
    Locate<Bits> sums, plain;
};
inline Locator<uint16_t> locator(F16, F16) { return {isa().locate_f16_f16, isa().locate_plain16}; }
inline Locator<uint16_t> locator(BF16, BF16) { return {isa().locate_bf16_bf16, isa().locate_plain16}; }
inline Locator<uint32_t> locator(F32, F32) { return {isa().locate_f32_f32, isa().locate_plain32}; }
inline Locator<uint32_t> locator(F16, F32) { return {isa().locate_f16_f32, isa().locate_plain32}; }
inline Locator<uint32_t> locator(BF16, F32) { return {isa().locate_bf16_f32, isa().locate_plain32}; }
inline Locator<uint64_t> locator(F64, F64) { return {isa().locate_f64_f64, isa().locate_plain64}; }

// The expected k-th key of the next chunk, and the distance below it at which candidates begin.
template <class Format>
class Guess {
  public:
    using Bits = typename Format::Bits;

    bool known() const { return key_ > 0; }
    Bits threshold(double margins = 1) const { return clamped(key_ - margins * margin_); }
    // Returns the likely distance from a key that ratio * k elements reach to the k-th key, which is larger.
    double above(double ratio, size_t k) const { return margin_ * std::log(ratio) / std::log1p(spread(k) / double(k)); }
    void missed() { margin_ = std::min(margin_ * MISSED, 4 * OCTAVE); }

    // Learns that the k-th key of a chunk was `key`, among `candidates` candidates.
    void learn(Bits key, size_t k, size_t candidates) {
        const double off = double(key) - key_;
        if (known()) margin_ *= 0.95 + 0.05 * std::clamp(spread(k) / (double(candidates - k) + 1), 0.0, 3.0);
        margin_ = std::max(margin_, OCTAVE / 256);
        key_ = known() && std::fabs(off) < margin_ ? key_ + off / 4 : double(key);
    }

  private:
    // The number of candidates beyond k that the margin should give; it varies by sqrt(k).
    static double spread(size_t k) { return 4 * std::sqrt(double(k)) + 4; }

    static constexpr double OCTAVE = double(Format::infinity & -Format::infinity);  // number of keys in one binade
    static Bits clamped(double key) {
        return key <= 1 ? Bits(1) : key >= double(Format::infinity) ? Bits(Format::infinity) : Bits(key);
    }

    double key_ = 0, margin_ = MARGIN * OCTAVE;
};

// Processes consecutive chunks on one thread.
template <class X, class R>
class Chunks {
  public:
    using Bits = typename R::Bits;
    using Accumulator = typename R::Accumulator;

    Chunks(Dense x, Dense* r, size_t k, size_t chunk, double decay, Scratch& scratch)
        : x_(static_cast<const typename X::Bits*>(x.data)), r_(r ? static_cast<Bits*>(r->data) : nullptr), n_(x.size), k_(k),
          chunk_(chunk), full_(std::min(chunk, 2 * k + SLACK)), decay_(decay) {
        const size_t room = std::min(chunk, full_ + TILE) + 64;
        index_ = Buffer<uint32_t>(scratch, room);
        bits_ = Buffer<Bits>(scratch, room);
        keys_ = Buffer<Bits>(scratch, room);
    }

    // Selects from chunks [first, last) and returns the number of entries.
    template <class Index>
    size_t run(size_t first, size_t last, Index* indices, Accumulator* values) {
        size_t o = 0;
        for (size_t c = first; c < last; c++) o += select(c * chunk_, std::min(chunk_, n_ - c * chunk_), indices + o, values + o);
        return o;
    }

  private:
    // Returns whether memory is idle during the work on this chunk.
    bool idle() const { return chunk_ <= TILE && count_ <= PREFETCH_UP_TO; }

    // Prefetches the next lines of the following chunk if memory is idle. Many lines at once are slower.
    void prefetch_ahead(size_t lines) {
        for (; lines && idle(); lines--, ahead_ += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(x_ + end_) + ahead_);
            if (r_) __builtin_prefetch(reinterpret_cast<const char*>(r_ + end_) + ahead_);
        }
    }

    // Calls work(i) for every i below `count`, and prefetches meanwhile.
    template <class Work>
    void each(size_t count, const Work& work) {
        const size_t step = idle() ? AHEAD : count;
        for (size_t i = 0; i < count;) {
            prefetch_ahead(1);
            for (const size_t end = std::min(count, i + step); i < end; i++) work(i);
        }
    }

    const Bits* stored(size_t i) const {
        if constexpr (sizeof(typename X::Bits) == sizeof(Bits)) return r_ ? r_ + i : x_ + i;
        return r_ + i;
    }

    template <class Index>
    size_t select(size_t begin, size_t size, Index* indices, Accumulator* values) {
        const bool all = k_ >= size;
        end_ = begin + size, ahead_ = 0;
        Bits from = guess_.known() && !all ? guess_.threshold() : Bits(1);
        collect(begin, size, from, true);
        if (count_ < k_ && from > 1) {
            guess_.missed();
            collect(begin, size, from = guess_.threshold(LOWER), false);
        }
        if (count_ < k_ && raised_) collect(begin, size, from = 1, false);
        Limit<Bits> limit{0, R::infinity, R::nan, 0};
        size_t room = count_;
        if (count_ > k_) {
            limit = kth(from);
            room = k_;
        }
        if (count_ >= k_ && !all) guess_.learn(count_ > k_ ? Bits(limit.kth + 1) : from, k_, count_);
        return write(begin, limit, room, indices, values);
    }

    // Finds the candidates of a chunk: all elements that reach `threshold`, or enough of them. `sums`: compute sums first.
    void collect(size_t begin, size_t size, Bits threshold, bool sums) {
        count_ = 0;
        raised_ = threshold > 1;
        for (size_t i = 0; i < size; i += TILE) {
            const size_t tile = std::min(TILE, size - i);
            const uint32_t base = uint32_t(i);
            const size_t found =
                sums && r_ ? locate_.sums(x_ + begin + i, r_ + begin + i, decay_, tile, threshold, base, index_.get() + count_)
                           : locate_.plain(stored(begin + i), nullptr, 1, tile, threshold, base, index_.get() + count_);
            const Bits* from = stored(begin);
            const uint32_t* index = index_.get() + count_;
            Bits* bits = bits_.get() + count_;
            count_ += found;
            each(found, [=](size_t i) { bits[i] = from[index[i]]; });
            if (i + TILE >= size) break;
            if (threshold == 1 && i == 0 && sums)
                raised_ = (threshold = raise(double(k_) / double(size) * double(tile))) > 1;
            else if (count_ > full_)
                threshold = prune();
        }
    }

    // Returns a threshold that k elements of the whole chunk likely reach, and drops smaller candidates of the first tile, of
    // which `mean` are expected to remain.
    Bits raise(double mean) {
        const double rank = mean + 5 * std::sqrt(mean) + 5;
        if (rank >= double(count_)) return 1;
        const Bits threshold = kth_largest(bits_.get(), count_, size_t(rank), R::infinity, keys_.get(), loops_).key;
        keep({Bits(threshold - 1), R::infinity, R::nan, 0}, loops_.reaching(bits_.get(), count_, threshold));
        return threshold;
    }

    // Keeps the k best candidates. Returns the threshold that a later element must reach to replace the last of them.
    Bits prune() {
        const Limit<Bits> limit = kth(1);
        keep(limit, k_);
        return above(limit.kth, R::infinity);
    }

    // Keeps the `room` candidates within the limit.
    void keep(const Limit<Bits>& limit, size_t room) {
        loops_.split(index_.get(), bits_.get(), count_, limit, {index_.get(), bits_.get(), room, 0}, nullptr, nullptr);
        count_ = room;
    }

    // Splits off the k best of more than k candidates, all of which reach `low`.
    Limit<Bits> kth(Bits low) {
        Limit<Bits> limit{0, R::infinity, R::nan, 0};
        if (count_ > COUNT_UP_TO) {
            const Kth<Bits> found = kth_largest(bits_.get(), count_, k_, R::infinity, keys_.get(), loops_);
            limit.kth = found.key, limit.ties = found.ties;
            return limit;
        }
        constexpr size_t lanes = 64 / sizeof(Bits);
        const size_t whole = (count_ + lanes - 1) / lanes * lanes;
        std::fill(bits_.get() + count_, bits_.get() + whole, Bits(0));
        Bits high = Bits(R::infinity + 2);  // more than k candidates reach low, fewer reach high
        size_t reach_low = count_, reach_high = 0;
        for (unsigned tries = 1; high - low > 1; tries++) {
            double step = double(high - low) / 2;
            if (tries % 4) {  // sometimes bisect, to guarantee the end
                if (high <= R::infinity)
                    step *= 2 * (double(reach_low - k_) + 0.5) / double(reach_low - reach_high);
                else if (low > 1)  // no key above is known
                    step = std::min(step, guess_.above(double(reach_low) / double(k_), k_));
            }
            const Bits last = Bits(high - low - 1);
            const Bits probe = Bits(low + (step < double(last) ? std::max<Bits>(1, Bits(step)) : last));
            prefetch_ahead(4);
            const size_t reached = loops_.reaching(bits_.get(), whole, probe);
            if (reached == k_) {
                limit.kth = Bits(probe - 1);
                return limit;
            }
            if (reached > k_)
                low = probe, reach_low = reached;
            else
                high = probe, reach_high = reached;
        }
        limit.kth = low, limit.ties = k_ - reach_high;
        return limit;
    }

    // Writes the `room` remaining candidates and clears them in the residual.
    template <class Index>
    size_t write(size_t begin, const Limit<Bits>& limit, size_t room, Index* indices, Accumulator* values) {
        constexpr bool direct = sizeof(Bits) == sizeof(Accumulator) && sizeof(Index) == sizeof(uint32_t);
        if constexpr (direct) {
            auto* index = reinterpret_cast<uint32_t*>(indices);
            const Kept<Bits> kept{index, reinterpret_cast<Bits*>(values), room, uint32_t(begin)};
            loops_.split(index_.get(), bits_.get(), count_, limit, kept, nullptr, nullptr);
            if (r_)
                each(room, [r = r_, index](size_t i) { r[index[i]] = 0; });
        } else {
            keep(limit, room);
            for (size_t i = 0; i < room; i++) {
                indices[i] = Index(begin + index_[i]);
                values[i] = quiet(R::widen(bits_[i]));
                if (r_) r_[begin + index_[i]] = 0;
            }
        }
        return room;
    }

    static Accumulator quiet(Accumulator value) {
        using Carried = std::conditional_t<sizeof(Accumulator) == 8, F64, F32>;
        return Carried::widen(canonical<Carried>(Carried::narrow(value)));
    }

    const typename X::Bits* x_;
    Bits* r_;
    size_t n_, k_, chunk_, full_;
    double decay_;
    const Locator<Bits> locate_ = locator(X{}, R{});
    const Select<Bits> loops_ = select_loops(Bits());
    Guess<R> guess_;
    Buffer<uint32_t> index_;
    Buffer<Bits> bits_, keys_;
    size_t count_ = 0;     // candidates in index_ and bits_
    size_t end_ = 0;       // begin of the next chunk
    size_t ahead_ = 0;     // bytes of it that were prefetched
    bool raised_ = false;  // some nonzero elements are not candidates
};

template <class X, class R, class Index>
size_t run(Dense x, Dense* r, size_t k, size_t chunk, double decay, Index* indices, typename R::Accumulator* values, int threads,
           Scratch& scratch) {
    const size_t chunks = (x.size + chunk - 1) / chunk;
    const size_t parts = std::min(chunks, parts_for(x.size, GRAIN, threads));
    std::vector<Chunks<X, R>> workers;  // allocate all scratch memory before writing
    workers.reserve(parts);
    for (size_t p = 0; p < parts; p++) workers.emplace_back(x, r, k, chunk, decay, scratch);
    std::vector<size_t> count(parts);
    const auto first = [&](size_t p) { return chunks / parts * p + std::min(p, chunks % parts); };
    parallel(parts, threads, [&](size_t p) { count[p] = workers[p].run(first(p), first(p + 1), indices + first(p) * k, values + first(p) * k); });
    size_t total = count[0];
    for (size_t p = 1; p < parts; p++) {  // close the gaps of chunks with few nonzero elements
        if (total < first(p) * k) {
            std::copy_n(indices + first(p) * k, count[p], indices + total);
            std::copy_n(values + first(p) * k, count[p], values + total);
        }
        total += count[p];
    }
    return total;
}

template <class X, class R>
size_t run(Dense x, Dense* r, size_t k, size_t chunk, double decay, bool int64_indices, void* indices, void* values, int threads,
           Scratch& scratch) {
    auto* to = static_cast<typename R::Accumulator*>(values);
    if (int64_indices) return run<X, R>(x, r, k, chunk, decay, static_cast<int64_t*>(indices), to, threads, scratch);
    return run<X, R>(x, r, k, chunk, decay, static_cast<int32_t*>(indices), to, threads, scratch);
}

}  // namespace

size_t chunk_room(size_t n, size_t k, size_t chunk) { return n / chunk * std::min(k, chunk) + std::min(k, n % chunk); }

size_t topk_by_chunk(Dense x, Dense* r, size_t k, size_t chunk, double decay, bool int64_indices, void* indices, void* values,
                     int threads, Scratch& scratch) {
    if (x.size == 0) return 0;
    if (chunk >= x.size && (!r || decay == 1)) return topk(x, r, k, int64_indices, indices, values, threads, scratch);
    chunk = std::min(chunk, x.size);
    k = std::min(k, chunk);
    return with_format(x.type, [&](auto format) -> size_t {
        using X = decltype(format);
        if constexpr (sizeof(typename X::Bits) == 2)
            if (r && r->type == Type::f32) return run<X, F32>(x, r, k, chunk, decay, int64_indices, indices, values, threads, scratch);
        return run<X, X>(x, r, k, chunk, decay, int64_indices, indices, values, threads, scratch);
    });
}

}  // namespace sparsecomm
