// Primitives for scan.inl in plain C++, for instruction sets without faster ones. Requires
//   unsigned popcount(uint64_t word)
//   unsigned select(uint64_t word, unsigned r)   the position of set bit r

template <class Counts>
inline void add_lanes(const Counts* sums, const uint16_t* before, uint16_t* after) {
    for (unsigned q = 0; q < 4; q++) {
        uint64_t total;
        std::memcpy(&total, before + 4 * q, 8);
        for (unsigned i = 0; i < sizeof(Counts) / 8; i++) total += sums[q][i];
        std::memcpy(after + 4 * q, &total, 8);
    }
}

inline size_t find(const V& bits, unsigned r) {
    unsigned earlier[8], total = 0;
    size_t g = 0;
    for (size_t j = 0; j < 8; j++) {
        earlier[j] = total;
        total += popcount(bits[j]);
        g += total <= r;
    }
    return 64 * g + select(bits[g], r - earlier[g]);
}

inline unsigned count_below(const V& bits, unsigned end) {
    unsigned total = popcount(bits[end / 64] & ((uint64_t(1) << end % 64) - 1));
    for (unsigned j = 0; j < 7; j++) total += popcount(j < end / 64 ? bits[j] : 0);
    return total;
}

inline size_t last_up_to(const uint16_t* sorted, unsigned limit) {
    size_t i = 0;
    for (size_t step = 8; step; step /= 2) i += sorted[i + step] <= limit ? step : 0;
    return i;
}
