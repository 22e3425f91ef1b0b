// Finds the r-th largest of a short list. Included by loops.inl.

constexpr size_t FEW = 32;  // maximum magnitudes for which each is compared with all

template <class Bits>
void extent(const Bits* bits, size_t count, Bits* low, Bits* high) {
    using Signed = std::make_signed_t<Bits>;  // every instruction set has vector comparisons for it
    Signed min_bits = std::numeric_limits<Signed>::max(), max_bits = 0;
    for (size_t i = 0; i < count; i++) {
        const auto m = Signed(magnitude(bits[i]));
        min_bits = m < min_bits ? m : min_bits;
        max_bits = m > max_bits ? m : max_bits;
    }
    *low = Bits(min_bits);
    *high = Bits(max_bits);
}

// Returns about a multiple of log2(count) plus a constant, for guessing.
inline float logarithm(float count) { return float(bit_cast<int32_t>(count)); }

// Finds the magnitude of a rank by comparing each of at most FEW magnitudes with all.
template <class Bits>
Kth<Bits> by_comparing(const Bits* few, size_t count, size_t rank) {
    Bits padded[FEW] = {}, larger[FEW] = {};  // numbers of larger magnitudes, as wide as the elements, so that compilers vectorize
    for (size_t i = 0; i < count; i++) padded[i] = few[i];
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < FEW; j++) larger[j] += Bits(few[i] > padded[j]);
    Kth<Bits> kth{magnitude_mask<Bits>, 0};
    for (size_t i = 0; i < count; i++)
        if (larger[i] < rank && padded[i] <= kth.key) kth = {padded[i], size_t(rank - larger[i])};
    return kth;
}

// Finds the magnitude of a rank by narrowing a bracket around it until it contains few magnitudes. The number of magnitudes
// that reach a guess falls about exponentially, so guesses interpolate its logarithm; every fourth one bisects, to guarantee
// the end.
template <class Bits>
Kth<Bits> by_counting(const Bits* bits, size_t count, size_t rank, Bits* room) {
    for (;;) {
        Bits low, high;
        extent(bits, count, &low, &high);
        high++;
        size_t reach = count, larger = 0;  // numbers of magnitudes at or above low, and high
        const float wanted = logarithm(float(rank));
        for (unsigned tries = 1; reach - larger > FEW && (reach - larger) * 8 > count && high - low > 1; tries++) {
            const float from = logarithm(float(reach)), to = logarithm(larger ? float(larger) : 0.5f);
            const float part = tries % 4 ? (from - wanted) / (from - to) : 0.5f;
            const Bits last = Bits(high - low - 1), guess = Bits(float(last) * part);
            const Bits middle = Bits(low + (guess < 1 ? Bits(1) : guess < last ? guess : last));
            const size_t reached = reaching(bits, count, middle);
            if (reached >= rank)
                low = middle, reach = reached;
            else
                high = middle, larger = reached;
        }
        rank -= larger;
        if (high - low == 1) return {low, rank};
        count = between(bits, count, low, high, room);
        if (count <= FEW) return by_comparing(room, count, rank);
        bits = room;
    }
}
