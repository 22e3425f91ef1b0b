// The high bits of packed indices. Included by loops_*.cpp like loops.inl. Uses one more primitive:
//   size_t high_words(const char* words, size_t bytes, uint64_t first, size_t count, unsigned l, Index* index, size_t* begin)
//     like `unpack_high`, for the first words, while there is room for 64 more entries; sets *begin to the number of bytes
//     processed, and returns the number of entries in them

// Sets index[i] to first + (number of zeros before set bit i << l). Returns false unless there are `count` set bits.
template <class Index>
bool unpack_high(const char* words, size_t bytes, uint64_t first, size_t count, unsigned l, Index* index) {
    size_t begin = 0, i = high_words(words, bytes, first, count, l, index, &begin);
    uint64_t word;
    const auto put = [&] {
        const uint64_t bit = begin * 8 + unsigned(__builtin_ctzll(word));
        index[i] = Index(first + ((bit - i) << l));
        i++;
    };
    for (; begin < bytes && count - i >= 64; begin += 8)  // there is room for a whole word
        for (memcpy(&word, words + begin, sizeof word); word; word &= word - 1) put();
    for (; begin < bytes; begin += 8)
        for (memcpy(&word, words + begin, sizeof word); word; word &= word - 1) {
            if (i == count) return false;
            put();
        }
    return i == count;
}
