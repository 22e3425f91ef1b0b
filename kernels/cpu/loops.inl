// The inner loops, written once in terms of the primitives of an instruction set. Included by loops_*.cpp after the
// primitives, inside a namespace per set, so that no instantiation for one set can be linked into another.
//
// The primitives, for each source of elements S (loops_portable.cpp defines their meaning):
//   uint64_t block(const S&, size_t i, Bits threshold)   stores sums; returns a mask of elements i .. i+63 >= threshold
//   size_t append_positions(mask, local, index, o)       appends the positions in a mask; returns the new o
// and, for each Bits, between_blocks, reaching_blocks and split_blocks, which process whole vectors and return the number of
// entries processed.

template <class S>
inline uint64_t tail_mask(const S& s, size_t i, size_t end, typename S::Bits threshold) {
    uint64_t mask = 0;
    for (size_t j = 0; i + j < end; j++) mask |= uint64_t(magnitude(s.accumulate(i + j)) >= threshold) << j;
    return mask;
}

// Like append_positions, without branches on the data if there are at most 4 positions, as usual.
inline size_t append_few_positions(uint64_t mask, uint32_t local, uint32_t* index, size_t o) {
    const size_t count = size_t(__builtin_popcountll(mask));
    if (__builtin_expect(count > 4, 0)) return append_positions(mask, local, index, o);
    for (size_t j = 0; j < 4; j++, mask &= mask - 1)
        index[o + j] = local + uint32_t(__builtin_ctzll(mask | uint64_t(1) << 63));
    return o + count;
}

constexpr size_t TILE = 2048;  // elements that remain in the L1 cache while their candidates are taken

template <class S>
size_t filter(const void* x, void* r, size_t origin, size_t begin, size_t end, typename S::Bits threshold, uint32_t* index,
              typename S::Bits* bits, size_t* count, size_t capacity) {
    const S s(x, r);
    size_t o = *count, i = begin;
    const size_t last = capacity >= 64 ? capacity - 64 : 0;
    [[maybe_unused]] bool many = false;  // many elements of the previous tile reached the threshold
    while (i < end && o <= last) {  // a tile: first find positions, then take elements
        const size_t tile = std::min(i + TILE, end);
        [[maybe_unused]] const size_t before = o;
        if constexpr (takes_blocks<S>)
            for (; many && i + 64 <= tile && o <= last; i += 64) {
                s.prefetch(i);
                o = take_block(s, i, block(s, i, threshold), uint32_t(i - origin), index, bits, o);
            }
        size_t found = o;
        for (; i + 64 <= tile && found <= last; i += 64) {
            s.prefetch(i);
            found = append_few_positions(block(s, i, threshold), uint32_t(i - origin), index, found);
        }
        if (tile < i + 64 && i < tile && found <= last) {
            found = append_few_positions(tail_mask(s, i, tile, threshold), uint32_t(i - origin), index, found);
            i = tile;
        }
        for (; o < found; o++) bits[o] = s.take(origin + index[o]);
        if constexpr (takes_blocks<S>) many = (o - before) * 32 > TILE;
    }
    *count = o;
    return i;
}

template <class S>
size_t locate(const void* x, void* r, double decay, size_t count, typename S::Bits threshold, uint32_t base, uint32_t* index) {
    const S s(x, r, decay);
    size_t o = 0, i = 0;
    for (; i + 64 <= count; i += 64) {
        o = append_few_positions(block(s, i, threshold), base + uint32_t(i), index, o);
    }
    return i < count ? append_few_positions(tail_mask(s, i, count, threshold), base + uint32_t(i), index, o) : o;
}

template <class Bits>
size_t between(const Bits* bits, size_t count, Bits low, Bits high, Bits* out) {
    size_t o = 0, i = between_blocks(bits, count, low, high, out, &o);
    for (; i < count; i++) {
        const Bits m = magnitude(bits[i]);
        out[o] = m;
        o += m >= low && m < high;
    }
    return o;
}

template <class Bits>
size_t reaching(const Bits* bits, size_t count, Bits threshold) {
    size_t o = 0, i = reaching_blocks(bits, count, threshold, &o);
    while (i < count) {
        Bits number = 0;  // as wide as the elements, so that compilers vectorize
        for (const size_t end = i + std::min<size_t>(count - i, 1 << 15); i < end; i++) number += Bits(magnitude(bits[i]) >= threshold);
        o += number;
    }
    return o;
}

#include "counting.inl"

template <class Bits>
void split(const uint32_t* index, const Bits* bits, size_t count, Limit<Bits> limit, Kept<Bits> kept,
           uint32_t* lost_index, Bits* lost_bits) {
    size_t stay = 0, lost = 0;
    size_t i = split_blocks(index, bits, count, limit, kept, lost_index, lost_bits, &stay, &lost);
    for (; i < count && stay < kept.room; i++) {
        const uint32_t where = index[i];
        const Bits what = bits[i], key = key_of(what, limit.infinity);
        const bool tie = key == limit.kth && limit.ties > 0, stays = key > limit.kth || tie;
        limit.ties -= tie;
        if (lost_index) {
            lost_index[lost] = where;
            lost_bits[lost] = what;
            lost += !stays;
        }
        kept.index[stay] = where + kept.base;
        kept.bits[stay] = key > limit.infinity ? limit.nan : what;
        stay += stays;
    }
    for (; lost_index && i < count; i++, lost++) {
        lost_index[lost] = index[i];
        lost_bits[lost] = bits[i];
    }
}

template <class Bits>
Bits largest(const Bits* bits, size_t count) {
    using Signed = std::make_signed_t<Bits>;  // every instruction set has a vector maximum for it
    constexpr size_t STREAMS = 8;             // for one stream, the processor does not prefetch enough
    const size_t length = count / STREAMS;
    Signed top = 0, each[STREAMS] = {};
    for (size_t i = 0; i < length; i++)
        for (size_t s = 0; s < STREAMS; s++) each[s] = std::max(each[s], Signed(magnitude(bits[s * length + i])));
    for (size_t i = STREAMS * length; i < count; i++) top = std::max(top, Signed(magnitude(bits[i])));
    for (const Signed one : each) top = std::max(top, one);
    return Bits(top);
}

template <class X, class Accumulator>
void quotients(const typename X::Bits* x, const UnitExponent<Accumulator>* exponent, Accumulator factor, Accumulator* sum,
               size_t count) {
    for (size_t i = 0; i < count; i++) sum[i] += factor * X::widen(x[i]) / unit_of<Accumulator>(exponent[i]);
}

template <class A>
void adamw_block(AdamWBlock<A>& b, AdamWLimits<A> limits) {
    const auto& c = b.row;
    for (size_t j = 0; j < b.SIZE; j++)
        adamw_step<A>(b.weight[j], b.mean[j], b.square[j], b.gradient[j] * unit_of<A>(b.exponent[j]), c[0][j], c[1][j], c[2][j],
                      c[3][j], c[4][j], c[5][j], limits.eps);
    for (size_t j = 0; j < b.SIZE; j++) {
        b.change[j] = b.weight[j] - b.before[j];
        b.jump[j] = jump_of<A>(b.weight[j], b.mean[j], b.square[j], b.before[j], b.exponent[j], limits);
    }
}

template <class Bits>
constexpr Select<Bits> selection() {
    return {between<Bits>, reaching<Bits>, by_counting<Bits>, split<Bits>, largest<Bits>};
}

constexpr Isa table(const char* name) {
    return {name,
            filter<Plain<uint16_t>>, filter<Held<uint16_t>>, filter<Fused<F16, F16>>, filter<Fused<BF16, BF16>>,
            filter<Plain<uint32_t>>, filter<Held<uint32_t>>, filter<Fused<F32, F32>>, filter<Fused<F16, F32>>, filter<Fused<BF16, F32>>,
            filter<Plain<uint64_t>>, filter<Held<uint64_t>>, filter<Fused<F64, F64>>,
            locate<Plain<uint16_t>>, locate<Fused<F16, F16>>, locate<Fused<BF16, BF16>>,
            locate<Plain<uint32_t>>, locate<Fused<F32, F32>>, locate<Fused<F16, F32>>, locate<Fused<BF16, F32>>,
            locate<Plain<uint64_t>>, locate<Fused<F64, F64>>,
            selection<uint16_t>(), selection<uint32_t>(), selection<uint64_t>(),
            {{}, value_codec<Half<BF16>>(), value_codec<Half<F16>>(), value_codec<Int8>(),  // by kind
             few_bits<3>(), few_bits<1>(), few_bits<0>()},
            unpack_high<int32_t>, unpack_high<int64_t>, all_finite,
            quotients<F32, float>, quotients<F16, float>, quotients<BF16, float>, quotients<F64, double>,
            adamw_block<float>, adamw_block<double>};
}
