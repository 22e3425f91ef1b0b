// The r-th largest of a short list. Included by loops.inl.

constexpr size_t FEW = 32;  // magnitudes that are compared with one another

template <class Bits>
void extent(const Bits* bits, size_t count, Bits* low, Bits* high) {
    using Signed = std::make_signed_t<Bits>;  // of which every set has vectors that compare
    Signed min_bits = std::numeric_limits<Signed>::max(), max_bits = 0;
    for (size_t i = 0; i < count; i++) {
        const auto m = Signed(magnitude(bits[i]));
        min_bits = m < min_bits ? m : min_bits;
        max_bits = m > max_bits ? m : max_bits;
    }
    *low = Bits(min_bits);
    *high = Bits(max_bits);
}

// A number that grows with the logarithm of a count, near enough to guess by.
inline float logarithm(float count) { return float(bit_cast<int32_t>(count)); }

// Of few magnitudes, all of them compared with one another.
template <class Bits>
Kth<Bits> by_comparing(const Bits* few, size_t count, size_t rank) {
    Bits padded[FEW] = {}, larger[FEW] = {};  // how many are: as wide as the elements, so that vectors can count
    for (size_t i = 0; i < count; i++) padded[i] = few[i];
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < FEW; j++) larger[j] += Bits(few[i] > padded[j]);
    Kth<Bits> kth{magnitude_mask<Bits>, 0};
    for (size_t i = 0; i < count; i++)
        if (larger[i] < rank && padded[i] <= kth.key) kth = {padded[i], size_t(rank - larger[i])};
    return kth;
}

// Counts how many reach one magnitude and another. That number falls like an exponential, and so the bracket around the answer
// is narrowed until few are in it, or few of the list; now and then it is halved, which ends.
template <class Bits>
Kth<Bits> by_counting(const Bits* bits, size_t count, size_t rank, Bits* room) {
    for (;;) {
        Bits low, high;
        extent(bits, count, &low, &high);
        high++;
        size_t reach = count, larger = 0;  // those at or above low, and high
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
