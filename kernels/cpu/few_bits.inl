// Values of int4, int2 and sign in the packed format: a sign and one of 2^BITS magnitudes, 64 values at a time. Included
// after values.inl. Uses two more primitives for 64 values:
//   uint64_t signs(const float* values)                   bit i is the sign of value i
//   void spread(uint64_t bits, uint32_t* all_or_none)     word i has all bits set if bit i is set, else none
//
// Every operation is rounded to float, and sums add the second half of the terms to the first, repeatedly. So all
// instruction sets, CUDA and NumPy (tests/reference.py) get the same results.

inline float absolute(float v) { return bit_cast<float>(magnitude(bit_cast<uint32_t>(v))); }
inline float if_all(uint32_t all_or_none, float v) { return bit_cast<float>(all_or_none & bit_cast<uint32_t>(v)); }
inline float power_of_two(int exponent) { return bit_cast<float>(uint32_t(exponent + 127) << 23); }  // a normal number

inline float tree_sum(const float* v) {
    float t[BLOCK / 2];
    for (size_t i = 0; i < 32; i++) t[i] = v[i] + v[i + 32];
    for (size_t i = 0; i < 16; i++) t[i] += t[i + 16];
    for (size_t i = 0; i < 8; i++) t[i] += t[i + 8];
    for (size_t i = 0; i < 4; i++) t[i] += t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

// Floats that are not negative order like their bits.
inline float largest_of(const float* v) {
    int32_t found = 0;
    for (size_t i = 0; i < BLOCK; i++) {
        const int32_t bits = bit_cast<int32_t>(v[i]);
        found = bits > found ? bits : found;
    }
    return bit_cast<float>(found);
}
inline float smallest_of(const float* v, size_t count) {
    int32_t found = bit_cast<int32_t>(F32::infinity);
    for (int32_t i = 0; i < int32_t(BLOCK); i++) {
        const int32_t bits = i < int32_t(count) ? bit_cast<int32_t>(v[i]) : int32_t(F32::infinity);
        found = bits < found ? bits : found;
    }
    return bit_cast<float>(found);
}

// The magnitudes of a block: lowest + j * step * UNIT * unit(), j from 0 to LAST. They are exact and finite.
template <unsigned BITS>
struct FewBits {
    static constexpr size_t PLANES = BITS + 1;
    static constexpr int LAST = (1 << BITS) - 1;
    static constexpr int UNIT = BITS == 1 ? 16 : 2;  // makes LAST * UNIT large enough for heavy tails
    uint16_t lowest_bits;                            // a bfloat16
    uint8_t step;

    float lowest() const { return bfloat_to_float(lowest_bits); }
    float unit() const {  // unit in the last place of lowest()
        const int biased = lowest_bits >> 7;
        return biased >= 8 ? bit_cast<float>(uint32_t(biased - 7) << 23) : bit_cast<float>(1u << (15 + (biased ? biased : 1)));
    }
    float spacing() const { return float(step * UNIT) * unit(); }
    float highest() const { return lowest() + LAST * spacing(); }
    bool valid() const { return lowest_bits && lowest_bits <= 0x7f7f && finite(highest()); }

    // Finds the magnitudes of a quantized block, from the magnitudes u of its `count` values, followed by zeros. If the block
    // is not quantized, the result is arbitrary.
    static FewBits found_in(const float* u, size_t count) {
        FewBits block{uint16_t(bit_cast<uint32_t>(smallest_of(u, count)) >> 16), 0};
        if (block.lowest_bits == 0) block.lowest_bits = 1;
        if (BITS) {
            const float steps = (largest_of(u) - block.lowest()) / (LAST * UNIT * block.unit());
            block.step = uint8_t(steps > 0 ? steps < 255 ? steps : 255 : 0);
        }
        return block;
    }

    // Chooses magnitudes with a small squared error, for `count` magnitudes followed by zeros.
    static FewBits chosen_for(const float* magnitudes, size_t count) {
        const int top = int(bit_cast<uint32_t>(largest_of(magnitudes)) >> 23) - 127;
        const int exponent = top < -126 ? -126 : top > 126 ? 126 : top;
        const float scale = power_of_two(-exponent);
        float u[BLOCK], above[BLOCK], part[BLOCK];
        for (size_t i = 0; i < BLOCK; i++) {  // the largest is then from 1 to 2, unless denormal
            const float scaled = magnitudes[i] * scale;
            u[i] = scaled > 2.0f ? 2.0f : scaled;
        }
        const float low = smallest_of(u, count);
        const float high = largest_of(u);
        for (size_t i = 0; i < BLOCK; i++) {
            const float over = u[i] - low;
            above[i] = over > 0.0f ? over : 0.0f;
        }
        float lower = bit_cast<float>(F32::infinity), upper = lower;
        if (BITS == 1) {  // split at 3/4 of (sum of squares / sum)
            for (size_t i = 0; i < BLOCK; i++) part[i] = above[i] * above[i];
            const float total = tree_sum(above);
            lower = upper = 0.75f * (tree_sum(part) / (total > 0.0f ? total : 1.0f));
        } else if (BITS) {  // only magnitudes near the ends count
            lower = 3.0f / 32 * (high - low), upper = 29.0f / 32 * (high - low);
        }
        uint32_t below = 0, beyond = 0;
        for (size_t i = 0; i < BLOCK; i++) {
            const uint32_t in = 0u - uint32_t(above[i] <= lower);
            part[i] = if_all(in, above[i]);
            below -= in;
        }
        const float n_lower = float(uint32_t(below - (BLOCK - count)));
        float a = low + tree_sum(part) / n_lower, b = a;
        FewBits block;
        if (BITS == 0) {
            block.fit(a, b, exponent);
            return block;
        }
        for (size_t i = 0; i < BLOCK; i++) {
            const uint32_t in = 0u - uint32_t(above[i] > upper);
            part[i] = if_all(in, above[i]);
            beyond -= in;
        }
        const float n_upper = float(beyond);
        if (beyond) {
            b = low + tree_sum(part) / n_upper;
            b = b > high ? high : b;
        }
        if (!block.fit(a, b, exponent)) {  // choose a so that the ends a and ratio * a have the least squared error
            const float ratio = float(1 + LAST * UNIT);
            a = (n_lower * a + ratio * n_upper * b) / (n_lower + ratio * ratio * n_upper);
            b = ratio * a < b ? ratio * a : b;
            block.fit(a, b, exponent);
        }
        return block;
    }

    // Sets the bit planes of all values: signs, then the bits of levels. Overwrites their magnitudes u.
    void planes_of(const float* values, float* u, uint64_t* planes) const {
        float apart[BLOCK];
        planes[0] = signs(values);
        const float space = spacing(), base = step ? lowest() : bit_cast<float>(F32::infinity);
        for (unsigned bit = BITS; bit-- > 0;) {
            const float threshold = base + (float(1 << bit) - 0.5f) * space, down = float(1 << bit) * space;
            for (size_t i = 0; i < BLOCK; i++) apart[i] = u[i] - threshold;
            planes[1 + bit] = ~signs(apart);
            if (bit == 0) break;
            for (size_t i = 0; i < BLOCK; i++) u[i] -= if_all(0u - uint32_t(apart[i] >= 0.0f), down);
        }
    }

    void widen(const uint64_t* planes, float* v) const {
        uint32_t in[BLOCK];
        const float bottom = lowest(), space = spacing();
        for (size_t i = 0; i < BLOCK; i++) v[i] = bottom;
        for (unsigned bit = 0; bit < BITS; bit++) {
            spread(planes[1 + bit], in);
            const float up = float(1 << bit) * space;
            for (size_t i = 0; i < BLOCK; i++) v[i] += if_all(in[i], up);
        }
        spread(planes[0], in);
        for (size_t i = 0; i < BLOCK; i++) v[i] = bit_cast<float>(bit_cast<uint32_t>(v[i]) | (in[i] & 0x80000000u));
    }

    // Rounds all values. Overwrites their magnitudes u.
    void round(const float* values, float* u, float* rounded) const {
        const float bottom = lowest(), space = spacing(), base = step ? bottom : bit_cast<float>(F32::infinity);
        for (size_t i = 0; i < BLOCK; i++) rounded[i] = bottom;
        for (unsigned bit = BITS; bit-- > 0;) {
            const float threshold = base + (float(1 << bit) - 0.5f) * space, up = float(1 << bit) * space;
            for (size_t i = 0; i < BLOCK; i++) {
                const float moved = if_all(0u - uint32_t(u[i] >= threshold), up);
                rounded[i] += moved;
                u[i] -= moved;
            }
        }
        for (size_t i = 0; i < BLOCK; i++) {
            const uint32_t sign = bit_cast<uint32_t>(values[i]) & 0x80000000u;
            rounded[i] = bit_cast<float>(bit_cast<uint32_t>(rounded[i]) | sign);
        }
    }

  private:
    // Sets the lowest magnitude to about a, and the step so that the highest is near b. Returns false if the step would
    // exceed 255.
    bool fit(float a, float b, int exponent) {
        const float back = power_of_two(exponent);
        lowest_bits = float_to_bfloat((a > 0x1p-14f ? a : 0x1p-14f) * back);
        if (lowest_bits == 0) lowest_bits = 1;
        step = 0;
        if (BITS == 0) return true;
        const float scale = power_of_two(-exponent);
        const float exact = (b - lowest() * scale) / (float(LAST * UNIT) * (unit() * scale));
        const float steps = exact + (BITS == 1 ? 0.5f : 0.0f);  // BITS == 1: round to nearest, else down
        step = uint8_t(steps > 0 ? steps < 255 ? steps : 255 : 0);
        return steps < 256;
    }
};

inline size_t blocks_of(size_t count) { return (count + BLOCK - 1) / BLOCK; }

// Calls each(block number, its values, their number) for all blocks; zeros follow the last value.
template <class Each>
inline void for_blocks(const float* values, size_t count, Each&& each) {
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) each(i / BLOCK, values + i, BLOCK);
    if (i == count) return;
    float last[BLOCK] = {};
    memcpy(last, values + i, (count - i) * sizeof(float));
    each(i / BLOCK, last, count - i);
}

inline void absolutes(const float* values, float* u) {
    for (size_t i = 0; i < BLOCK; i++) u[i] = absolute(values[i]);
}

template <unsigned BITS>
void pack_few(const float* values, size_t count, char* out) {
    using Block = FewBits<BITS>;
    constexpr size_t bytes = Block::PLANES * sizeof(uint64_t);
    char* lowest = out + blocks_of(count) * bytes;
    char* steps = lowest + blocks_of(count) * sizeof(uint16_t);
    for_blocks(values, count, [&](size_t number, const float* v, size_t its) {
        float u[BLOCK];
        uint64_t planes[Block::PLANES];
        absolutes(v, u);
        const Block block = Block::found_in(u, its);
        block.planes_of(v, u, planes);
        memcpy(out + number * bytes, planes, bytes);
        memcpy(lowest + number * sizeof(uint16_t), &block.lowest_bits, sizeof(uint16_t));
        if (BITS) steps[number] = char(block.step);
    });
}

template <unsigned BITS>
const char* unpack_few(const char* data, size_t count, float* values) {
    using Block = FewBits<BITS>;
    constexpr size_t bytes = Block::PLANES * sizeof(uint64_t);
    const size_t blocks = blocks_of(count);
    const char* lowest = data + blocks * bytes;
    const char* steps = lowest + blocks * sizeof(uint16_t);
    uint64_t planes[Block::PLANES], set = 0;
    bool good = true;
    const auto read = [&](size_t number) {
        Block block{0, BITS ? uint8_t(steps[number]) : uint8_t(0)};
        memcpy(&block.lowest_bits, lowest + number * sizeof(uint16_t), sizeof(uint16_t));
        memcpy(planes, data + number * bytes, bytes);
        good &= block.valid();
        return block;
    };
    for (size_t i = 0; i + BLOCK <= count; i += BLOCK) read(i / BLOCK).widen(planes, values + i);
    const size_t others = count % BLOCK;
    if (others) {
        float last[BLOCK];
        read(blocks - 1).widen(planes, last);
        memcpy(values + (count - others), last, others * sizeof(float));
        for (const uint64_t plane : planes) set |= plane >> others;
    }
    return !good ? "a block of values with an invalid magnitude" : set ? "unused bits that are not zero" : nullptr;
}

template <unsigned BITS>
size_t quantize_few(const float* values, size_t count, float* rounded, float* errors) {
    for_blocks(values, count, [&](size_t number, const float* v, size_t its) {
        float u[BLOCK], to[BLOCK], error[BLOCK];
        absolutes(v, u);
        const auto block = FewBits<BITS>::chosen_for(u, its);
        block.round(v, u, to);
        for (size_t i = 0; i < BLOCK; i++) error[i] = v[i] - to[i];
        memcpy(rounded + number * BLOCK, to, its * sizeof(float));
        memcpy(errors + number * BLOCK, error, its * sizeof(float));
    });
    return 0;
}

template <unsigned BITS>
constexpr ValueCodec few_bits() {
    return {0, BITS + 1, BLOCK, BITS ? 3 : 2, true, pack_few<BITS>, unpack_few<BITS>, quantize_few<BITS>};
}
