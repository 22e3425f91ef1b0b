// Messages of int4, int2 and sign, and primitives of ../few_bits.hpp: `signs` and `spread` belong to the instruction set. Included
// after values.inl.

constexpr unsigned HELD = BLOCK;

inline float sum_of(const float* v) {
    float t[BLOCK / 2];
    for (size_t i = 0; i < 32; i++) t[i] = v[i] + v[i + 32];
    for (size_t i = 0; i < 16; i++) t[i] += t[i + 16];
    for (size_t i = 0; i < 8; i++) t[i] += t[i + 8];
    for (size_t i = 0; i < 4; i++) t[i] += t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

// Floats that are not negative order like their bits.
inline float largest_of(const float* v) {
    int32_t largest = 0;
    for (size_t i = 0; i < BLOCK; i++) {
        const int32_t bits = bit_cast<int32_t>(v[i]);
        largest = bits > largest ? bits : largest;
    }
    return bit_cast<float>(largest);
}
inline float smallest_of(const float* v, unsigned count) {
    int32_t smallest = int32_t(F32::infinity);
    for (int32_t i = 0; i < int32_t(BLOCK); i++) {
        const int32_t bits = i < int32_t(count) ? bit_cast<int32_t>(v[i]) : int32_t(F32::infinity);
        smallest = bits < smallest ? bits : smallest;
    }
    return bit_cast<float>(smallest);
}

template <class Test>
inline uint32_t keep_if(const float* v, float* kept, Test test) {
    uint32_t count = 0;
    for (size_t i = 0; i < BLOCK; i++) {
        const uint32_t all_or_none = 0u - uint32_t(test(v[i]));
        kept[i] = bit_cast<float>(all_or_none & bit_cast<uint32_t>(v[i]));
        count -= all_or_none;
    }
    return count;
}

#include "../few_bits.hpp"

inline size_t blocks_of(size_t count) { return (count + BLOCK - 1) / BLOCK; }

// Calls each(block number, its values, their number) for all blocks; zeros follow the last value.
template <class Each>
inline void for_blocks(const float* values, size_t count, Each&& each) {
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) each(i / BLOCK, values + i, unsigned(BLOCK));
    if (i == count) return;
    float last[BLOCK] = {};
    memcpy(last, values + i, (count - i) * sizeof(float));
    each(i / BLOCK, last, unsigned(count - i));
}

template <int BITS>
void pack_few(const float* values, size_t count, char* out) {
    using Block = FewBits<BITS>;
    constexpr size_t bytes = Block::PLANES * sizeof(uint64_t);
    char* lowest = out + blocks_of(count) * bytes;
    char* steps = lowest + blocks_of(count) * sizeof(uint16_t);
    for_blocks(values, count, [&](size_t number, const float* v, unsigned size) {
        float u[BLOCK];
        uint64_t planes[Block::PLANES];
        magnitudes_of(v, u);
        const Block block = Block::of_quantized(u, size);
        block.planes_of(v, u, planes);
        memcpy(out + number * bytes, planes, bytes);
        const uint16_t lowest_bits = uint16_t(block.lowest_bits);
        memcpy(lowest + number * sizeof(uint16_t), &lowest_bits, sizeof(uint16_t));
        if (BITS) steps[number] = char(block.step);
    });
}

template <int BITS>
const char* unpack_few(const char* data, size_t count, float* values) {
    using Block = FewBits<BITS>;
    constexpr size_t bytes = Block::PLANES * sizeof(uint64_t);
    const size_t blocks = blocks_of(count);
    const char* lowest = data + blocks * bytes;
    const char* steps = lowest + blocks * sizeof(uint16_t);
    uint64_t planes[Block::PLANES], set = 0;
    bool good = true;
    const auto read = [&](size_t number) {
        uint16_t lowest_bits;
        memcpy(&lowest_bits, lowest + number * sizeof(uint16_t), sizeof(uint16_t));
        const Block block{lowest_bits, BITS ? uint8_t(steps[number]) : 0};
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

template <int BITS>
size_t quantize_few(const float* values, size_t count, float* rounded, float* errors) {
    for_blocks(values, count, [&](size_t number, const float* v, unsigned size) {
        float u[BLOCK], to[BLOCK], error[BLOCK];
        magnitudes_of(v, u);
        const auto block = FewBits<BITS>::chosen_for(u, size);
        block.round(v, u, to);
        for (size_t i = 0; i < BLOCK; i++) error[i] = v[i] - to[i];
        memcpy(rounded + number * BLOCK, to, size * sizeof(float));
        memcpy(errors + number * BLOCK, error, size * sizeof(float));
    });
    return 0;
}

template <int BITS>
constexpr ValueCodec few_bits() {
    using Block = FewBits<BITS>;
    return {Block::BYTES, Block::PLANES, Block::SHARING, Block::SHARED, true, pack_few<BITS>, unpack_few<BITS>, quantize_few<BITS>};
}
