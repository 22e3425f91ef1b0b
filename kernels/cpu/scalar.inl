// Default primitives of loops.inl, for an instruction set or type without vector versions. Included after sources.inl, inside
// the namespace of a set; overloads for some types may follow.

template <class Index>
inline size_t high_words(const char*, size_t, uint64_t, size_t, unsigned, Index*, size_t*) { return 0; }

// Process no entries, so that the scalar loops of loops.inl process all.
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
