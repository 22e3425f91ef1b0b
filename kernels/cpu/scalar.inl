// The primitives of loops.inl for what a set does without vectors: entries one by one. Included after sources.inl, inside
// the namespace of a set; overloads for some types may follow.

template <class Index>
inline size_t high_words(const char*, size_t, uint64_t, size_t, unsigned, Index*, size_t*) { return 0; }

// Whole vectors of entries: none. Return how many entries were done.
template <class Bits>
inline size_t between_blocks(const Bits*, size_t, Bits, Bits, Bits*, size_t*) { return 0; }
template <class Bits>
inline size_t reaching_blocks(const Bits*, size_t, Bits, size_t*) { return 0; }

template <class Bits>
inline size_t split_blocks(const uint32_t*, const Bits*, size_t, Limit<Bits>&, const Kept<Bits>&, uint32_t*, Bits*,
                           size_t*, size_t*) {
    return 0;
}

template <class S>
constexpr bool takes_blocks = false;
