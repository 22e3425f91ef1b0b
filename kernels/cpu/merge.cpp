// Merging of index-sorted sparse vectors.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "buffer.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "rank_select.hpp"
#include "scan.hpp"

namespace sparsecomm {

namespace {

constexpr size_t FAR_FEWER = 16;  // ratio of entries from which searching pays

template <class Index, class Format>
struct Entries {
    const Index* index;
    const typename Format::Accumulator* value;
    size_t count;
    explicit Entries(const Sparse& s)
        : index(static_cast<const Index*>(s.indices)),
          value(static_cast<const typename Format::Accumulator*>(s.values)),
          count(s.count) {}
};

template <class Format>
typename Format::Accumulator canonical_value(typename Format::Accumulator v) {
    return v == v ? v : Format::widen(Format::nan);
}

// Returns 0 or 1 as a number that is opaque to the compiler, so that it does not generate a branch.
inline size_t number(bool condition) {
    size_t value = condition;
    asm("" : "+r"(value));
    return value;
}

// Returns the value or -0, which does not change a value when added.
template <class Format>
typename Format::Accumulator if_taken(size_t taken, typename Format::Accumulator v) {
    using Bits = typename Format::Bits;
    constexpr Bits minus_zero = Bits(magnitude_mask<Bits> + 1);
    const Bits all = Bits(-Bits(taken));
    return bit_cast<typename Format::Accumulator>(Bits((bit_cast<Bits>(v) & all) | (minus_zero & ~all)));
}

// Adds two vectors without branches on the data, which would be unpredictable.
template <class Index, class Format>
size_t merge_into(const Entries<Index, Format>& a, const Entries<Index, Format>& b, Index* index,
                  typename Format::Accumulator* value) {
    size_t i = 0, j = 0, o = 0;
    const auto put = [&](Index where, typename Format::Accumulator what) {
        index[o] = where;
        value[o] = canonical_value<Format>(what);
        o += what != 0;
    };
    while (i < a.count && j < b.count) {
        const Index p = a.index[i], q = b.index[j];
        const size_t left = number(p <= q), right = number(q <= p);
        put(p < q ? p : q, if_taken<Format>(left, a.value[i]) + if_taken<Format>(right, b.value[j]));
        i += left;
        j += right;
    }
    for (; i < a.count; i++) put(a.index[i], a.value[i]);
    for (; j < b.count; j++) put(b.index[j], b.value[j]);
    return o;
}

// A sum, including zeros, and the number of vectors of each entry: 1 for all if `counts` is null.
template <class Index, class Value>
struct Counted {
    const Index* index;
    const Value* value;
    const uint32_t* counts;
    size_t count;
    Buffer<Index> index_memory;
    Buffer<Value> value_memory;
    Buffer<uint32_t> counts_memory;
};

// Like merge_into, with counts. With OneA or OneB, all counts of a or b are 1.
template <bool OneA, bool OneB, class Format, class Index, class Value>
void merge_counted(const Counted<Index, Value>& a, const Counted<Index, Value>& b, Counted<Index, Value>& sum) {
    Index* index = sum.index_memory.get();
    Value* value = sum.value_memory.get();
    uint32_t* counts = sum.counts_memory.get();
    size_t i = 0, j = 0, o = 0;
    while (i < a.count && j < b.count) {
        const Index p = a.index[i], q = b.index[j];
        const size_t left = number(p <= q), right = number(q <= p);
        index[o] = p < q ? p : q;
        value[o] = canonical_value<Format>(if_taken<Format>(left, a.value[i]) + if_taken<Format>(right, b.value[j]));
        counts[o++] = uint32_t(left) * (OneA ? 1 : a.counts[i]) + uint32_t(right) * (OneB ? 1 : b.counts[j]);
        i += left;
        j += right;
    }
    const auto rest = [&](const Counted<Index, Value>& from, size_t begin, bool one) {
        for (; begin < from.count; begin++, o++) {
            index[o] = from.index[begin];
            value[o] = canonical_value<Format>(from.value[begin]);
            counts[o] = one ? 1 : from.counts[begin];
        }
    };
    rest(a, i, OneA);
    rest(b, j, OneB);
    sum.count = o;
}

// Like Split in isa.hpp, for 64-bit indices.
template <class Bits>
void split_entries(const int64_t* index, const Bits* bits, size_t count, const Limit<Bits>& limit, int64_t* kept_index,
                   Bits* kept_bits, int64_t* lost_index, Bits* lost_bits) {
    size_t ties = limit.ties;
    for (size_t i = 0; i < count; i++) {
        const Bits key = key_of(bits[i], limit.infinity);
        const bool tie = key == limit.kth && ties > 0, stays = key > limit.kth || tie;
        ties -= tie;
        *(stays ? kept_index : lost_index)++ = index[i];
        *(stays ? kept_bits : lost_bits)++ = bits[i];
    }
}

template <class F>
void with_types(bool int64_indices, bool float64_values, F&& f) {
    if (int64_indices)
        float64_values ? f(int64_t(), F64{}) : f(int64_t(), F32{});
    else
        float64_values ? f(int32_t(), F64{}) : f(int32_t(), F32{});
}

}  // namespace

void merge(Sparse a, Sparse b, bool int64_indices, bool float64_values, SparseOut* sum) {
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        using Index = decltype(zero);
        using Format = decltype(format);
        sum->count = merge_into(Entries<Index, Format>(a), Entries<Index, Format>(b), static_cast<Index*>(sum->indices),
                                static_cast<typename Format::Accumulator*>(sum->values));
    });
}

void sum_and_count(const Sparse* vectors, size_t number, bool int64_indices, bool float64_values, SparseOut* sum, void* counts,
                   Scratch& scratch) {
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        using Index = decltype(zero);
        using Format = decltype(format);
        using Value = typename Format::Accumulator;
        std::vector<Counted<Index, Value>> sums;
        for (size_t i = 0; i < number; i++) {
            const Entries<Index, Format> e(vectors[i]);
            sums.push_back({e.index, e.value, nullptr, e.count, {}, {}, {}});
        }
        while (sums.size() > 1) {
            std::vector<Counted<Index, Value>> pairs;
            for (size_t i = 0; i + 1 < sums.size(); i += 2) {
                const auto &a = sums[i], &b = sums[i + 1];
                const size_t room = a.count + b.count;
                Counted<Index, Value> pair{nullptr, nullptr, nullptr, 0, {scratch, room}, {scratch, room}, {scratch, room}};
                if (a.counts)
                    b.counts ? merge_counted<false, false, Format>(a, b, pair) : merge_counted<false, true, Format>(a, b, pair);
                else
                    merge_counted<true, true, Format>(a, b, pair);  // an unpaired vector comes last
                pair.index = pair.index_memory.get();
                pair.value = pair.value_memory.get();
                pair.counts = pair.counts_memory.get();
                pairs.push_back(std::move(pair));
            }
            if (sums.size() % 2) pairs.push_back(std::move(sums.back()));
            sums = std::move(pairs);
        }
        auto* index = static_cast<Index*>(sum->indices);
        auto *value = static_cast<Value*>(sum->values), *count = static_cast<Value*>(counts);
        size_t o = 0;
        for (size_t i = 0; i < sums[0].count; i++) {
            index[o] = sums[0].index[i];
            value[o] = sums[0].value[i];
            count[o] = sums[0].counts ? Value(sums[0].counts[i]) : Value(1);
            o += sums[0].value[i] != 0;
        }
        sum->count = o;
    });
}

void divide_by(Sparse entries, const void* counts, bool int64_indices, bool float64_values, SparseOut* means) {
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        using Index = decltype(zero);
        using Format = decltype(format);
        using Value = typename Format::Accumulator;
        const Entries<Index, Format> e(entries);
        const auto* by = static_cast<const Value*>(counts);
        auto* index = static_cast<Index*>(means->indices);
        auto* value = static_cast<Value*>(means->values);
        size_t o = 0;
        for (size_t i = 0; i < e.count; i++) {
            const Value mean = e.value[i] / by[i];
            index[o] = e.index[i];
            value[o] = canonical_value<Format>(mean);
            o += mean != 0;
        }
        means->count = o;
    });
}

void merge_topk(Sparse a, Sparse b, size_t k, bool int64_indices, bool float64_values, SparseOut* kept, SparseOut* rejected,
                Scratch& scratch) {
    rejected->count = 0;
    const size_t max_count = a.count + b.count;
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        using Index = decltype(zero);
        using Format = decltype(format);
        using Bits = typename Format::Bits;
        if (max_count <= k) {
            merge(a, b, int64_indices, float64_values, kept);
            return;
        }
        const Select<Bits> loops = select_loops(Bits());
        Buffer<Index> index(scratch, max_count), lost_index(scratch, max_count + 16);
        Buffer<Bits> bits(scratch, max_count), lost_bits(scratch, max_count + 16);
        const size_t count = merge_into(Entries<Index, Format>(a), Entries<Index, Format>(b), index.get(),
                                        reinterpret_cast<typename Format::Accumulator*>(bits.get()));
        kept->count = std::min(k, count);
        rejected->count = count - kept->count;
        auto* kept_index = static_cast<Index*>(kept->indices);
        auto* kept_bits = static_cast<Bits*>(kept->values);
        if (count <= k) {
            std::copy_n(index.get(), count, kept_index);
            std::copy_n(bits.get(), count, kept_bits);
            return;
        }
        Kth<Bits> kth{Bits(Format::infinity + 1), 0};
        if (k) kth = kth_largest(bits.get(), count, k, Format::infinity, lost_bits.get(), loops);
        const Limit<Bits> limit{kth.key, Format::infinity, Format::nan, kth.ties};
        if constexpr (sizeof(Index) == 8)
            split_entries(index.get(), bits.get(), count, limit, kept_index, kept_bits, lost_index.get(), lost_bits.get());
        else
            loops.split(reinterpret_cast<uint32_t*>(index.get()), bits.get(), count, limit,
                        {reinterpret_cast<uint32_t*>(kept_index), kept_bits, k, 0},
                        reinterpret_cast<uint32_t*>(lost_index.get()), lost_bits.get());
        std::copy_n(lost_index.get(), rejected->count, static_cast<Index*>(rejected->indices));
        std::copy_n(lost_bits.get(), rejected->count, static_cast<Bits*>(rejected->values));
    });
}

void values_at(Sparse entries, const void* others, size_t other_count, bool int64_indices, bool float64_values, void* out) {
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        using Index = decltype(zero);
        using Value = typename decltype(format)::Accumulator;
        const Entries<Index, decltype(format)> e(entries);
        const Index* other = static_cast<const Index*>(others);
        Value* found = static_cast<Value*>(out);
        size_t i = 0, j = 0;
        if (e.count / FAR_FEWER > other_count) {
            for (; i < other_count; i++) {
                j = std::lower_bound(e.index + j, e.index + e.count, other[i]) - e.index;
                found[i] = j < e.count && e.index[j] == other[i] ? e.value[j] : Value(0);
            }
            return;
        }
        while (i < other_count && j < e.count) {  // the value written at i counts only if i advances
            const Index p = other[i], q = e.index[j];
            const Value value = e.value[j];
            found[i] = p == q ? value : Value(0);
            i += number(p <= q);
            j += number(q <= p);
        }
        std::fill(found + i, found + other_count, Value(0));
    });
}

bool well_formed(Sparse entries, size_t begin, size_t end, bool int64_indices, bool float64_values) {
    bool good = true;
    with_types(int64_indices, float64_values, [&](auto zero, auto format) {
        const Entries<decltype(zero), decltype(format)> e(entries);
        bool ordered = true, nonzero = true;
        for (size_t i = 1; i < e.count; i++) ordered &= e.index[i - 1] < e.index[i];
        for (size_t i = 0; i < e.count; i++) nonzero &= e.value[i] != 0;
        good = nonzero && ordered &&
               (e.count == 0 || (e.index[0] >= 0 && uint64_t(e.index[0]) >= uint64_t(begin) &&
                                 uint64_t(e.index[e.count - 1]) < uint64_t(end)));
    });
    return good;
}

}  // namespace sparsecomm
