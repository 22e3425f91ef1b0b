// Values of int4, int2 and sign in the packed format: a sign and one of 2^BITS magnitudes, in blocks of 64 values. Included in
// the namespace of each instruction set of the CPU, and in that of CUDA kernels.
//
// A thread has HELD of the BLOCK = 64 values: all on a CPU, two in each lane of a warp on CUDA; zeros follow the last value of
// a vector. The following primitives are declared before. On CUDA, all lanes call them, and the functions that take values.
//   float sum_of(const float* v)                              the sum over the block
//   float largest_of(const float* v)                          the maximum over the block, of values that are not negative
//   float smallest_of(const float* v, unsigned count)         the minimum of the block's first `count` values, not negative
//   unsigned keep_if(const float* v, float* kept, Test test)  sets `kept` to v, or 0 where the test fails; returns the number
//                                                             of the block's values that pass
//   uint64_t signs(const float* v)                            bit i is the sign of the block's value i
//   void spread(uint64_t bits, uint32_t* words)               a value's word has all bits set if its bit is set, else none
// Every operation is rounded to float, and sums add the second half of the terms to the first, repeatedly. So all instruction
// sets, CUDA and NumPy (tests/reference.py) get the same results.
#define HERE SPARSECOMM_ON_TARGET

HERE void magnitudes_of(const float* values, float* u) {
    for (size_t i = 0; i < HELD; i++) u[i] = F32::widen(magnitude(F32::narrow(values[i])));
}
HERE float if_all(uint32_t all_or_none, float v) { return bit_cast<float>(all_or_none & bit_cast<uint32_t>(v)); }

// The magnitudes of a block: lowest() + j * spacing(), j from 0 to LAST. They are exact and finite.
template <int BITS>
struct FewBits {
    static constexpr unsigned BYTES = 0, PLANES = BITS + 1, SHARING = BLOCK, SHARED = BITS ? 3 : 2;  // as in sparsecomm/tensors/kinds.py
    static constexpr int LAST = (1 << BITS) - 1;
    static constexpr int UNIT = BITS == 1 ? 16 : 2;  // makes LAST * UNIT large enough for heavy tails
    uint32_t lowest_bits;                            // a bfloat16
    int step;                                        // 8 bits

    HERE float lowest() const { return bfloat_to_float(uint16_t(lowest_bits)); }
    HERE float unit() const {  // unit in the last place of lowest()
        const uint32_t biased = lowest_bits >> 7;
        return bit_cast<float>(biased >= 8 ? (biased - 7) << 23 : 1u << (15 + (biased ? biased : 1)));
    }
    HERE float spacing() const { return float(step * UNIT) * unit(); }
    HERE float highest() const { return lowest() + float(LAST) * spacing(); }
    HERE bool valid() const { return lowest_bits && lowest_bits <= 0x7f7f && highest() < F32::widen(F32::infinity); }

    // Finds the magnitudes of a quantized block, from the magnitudes u of its `count` values, followed by zeros. If the block
    // is not quantized, the result is arbitrary.
    static HERE FewBits of_quantized(const float* u, unsigned count) {
        const uint32_t bits = F32::narrow(smallest_of(u, count)) >> 16;
        FewBits block{bits ? bits : 1, 0};
        if (BITS) block.step = to_byte((largest_of(u) - block.lowest()) / (float(LAST * UNIT) * block.unit()));
        return block;
    }

    // Chooses magnitudes with a small squared error, for `count` magnitudes followed by zeros.
    static HERE FewBits chosen_for(const float* magnitudes, unsigned count) {
        const int top = int(F32::narrow(largest_of(magnitudes)) >> 23) - 127;
        const int exponent = top < -126 ? -126 : top > 126 ? 126 : top;
        const float scale = power_of_two(-exponent);
        float u[HELD], above[HELD], part[HELD];
        for (size_t i = 0; i < HELD; i++) {  // the largest is then from 1 to 2, unless denormal
            const float scaled = magnitudes[i] * scale;
            u[i] = scaled > 2.0f ? 2.0f : scaled;
        }
        const float low = smallest_of(u, count), high = largest_of(u);
        for (size_t i = 0; i < HELD; i++) {
            const float over = u[i] - low;
            above[i] = over > 0.0f ? over : 0.0f;
        }
        float lower = F32::widen(F32::infinity), upper = lower;
        if (BITS == 1) {  // split at 3/4 of (sum of squares / sum)
            for (size_t i = 0; i < HELD; i++) part[i] = above[i] * above[i];
            const float total = sum_of(above);
            lower = upper = 0.75f * (sum_of(part) / (total > 0.0f ? total : 1.0f));
        } else if (BITS) {  // only magnitudes near the ends count
            lower = 3.0f / 32 * (high - low), upper = 29.0f / 32 * (high - low);
        }
        const unsigned below = keep_if(above, part, [=](float v) { return v <= lower; });
        const float n_lower = float(uint32_t(below - (BLOCK - count)));
        float a = low + sum_of(part) / n_lower, b = a;
        FewBits block{0, 0};
        if (BITS == 0) {
            block.fit(a, b, exponent);
            return block;
        }
        const unsigned beyond = keep_if(above, part, [=](float v) { return v > upper; });
        const float n_upper = float(beyond);
        if (beyond) {
            b = low + sum_of(part) / n_upper;
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
    template <class Word>  // of 64 bits
    HERE void planes_of(const float* values, float* u, Word* planes) const {
        float apart[HELD];
        planes[0] = signs(values);
        const float space = spacing(), base = first_threshold();
        for (int bit = BITS - 1; bit >= 0; bit--) {
            const float threshold = base + (float(1 << bit) - 0.5f) * space, down = float(1 << bit) * space;
            for (size_t i = 0; i < HELD; i++) apart[i] = u[i] - threshold;
            planes[1 + bit] = ~signs(apart);
            if (bit == 0) break;
            for (size_t i = 0; i < HELD; i++) u[i] -= if_all(0u - uint32_t(apart[i] >= 0.0f), down);
        }
    }

    template <class Word>
    HERE void widen(const Word* planes, float* v) const {
        uint32_t in[HELD];
        const float bottom = lowest(), space = spacing();
        for (size_t i = 0; i < HELD; i++) v[i] = bottom;
        for (int bit = 0; bit < BITS; bit++) {
            spread(planes[1 + bit], in);
            const float up = float(1 << bit) * space;
            for (size_t i = 0; i < HELD; i++) v[i] += if_all(in[i], up);
        }
        spread(planes[0], in);
        for (size_t i = 0; i < HELD; i++) v[i] = F32::widen(F32::narrow(v[i]) | (in[i] & 0x80000000u));
    }

    // Rounds all values. Overwrites their magnitudes u.
    HERE void round(const float* values, float* u, float* rounded) const {
        const float bottom = lowest(), space = spacing(), base = first_threshold();
        for (size_t i = 0; i < HELD; i++) rounded[i] = bottom;
        for (int bit = BITS - 1; bit >= 0; bit--) {
            const float threshold = base + (float(1 << bit) - 0.5f) * space, up = float(1 << bit) * space;
            for (size_t i = 0; i < HELD; i++) {
                const float moved = if_all(0u - uint32_t(u[i] >= threshold), up);
                rounded[i] += moved;
                u[i] -= moved;
            }
        }
        for (size_t i = 0; i < HELD; i++) {
            const uint32_t sign = F32::narrow(values[i]) & 0x80000000u;
            rounded[i] = F32::widen(F32::narrow(rounded[i]) | sign);
        }
    }

  private:
    HERE float first_threshold() const { return step ? lowest() : F32::widen(F32::infinity); }  // without a step, all levels are 0
    static HERE int to_byte(float steps) { return int(steps > 0 ? steps < 255 ? steps : 255 : 0); }  // rounds down

    // Sets the lowest magnitude to about a, and the step so that the highest is near b. Returns false if the step would
    // exceed 255.
    HERE bool fit(float a, float b, int exponent) {
        lowest_bits = float_to_bfloat((a > 0x1p-14f ? a : 0x1p-14f) * power_of_two(exponent));
        if (lowest_bits == 0) lowest_bits = 1;
        step = 0;
        if (BITS == 0) return true;
        const float scale = power_of_two(-exponent);
        const float exact = (b - lowest() * scale) / (float(LAST * UNIT) * (unit() * scale));
        const float steps = exact + (BITS == 1 ? 0.5f : 0.0f);  // BITS == 1: round to nearest, else down
        step = to_byte(steps);
        return steps < 256;
    }
};

#undef HERE
