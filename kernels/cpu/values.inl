// Values of bfloat16, float16 and int8 in the packed format, 64 at a time, in loops that compilers vectorize. Included by
// loops_*.cpp like loops.inl. Uses two primitives for F16 and BF16:
//   void widen_block(Format, const uint16_t* bits, float* values)   converts 64 values
//   void narrow_block(Format, const float* values, uint16_t* bits)  converts 64 values, to nearest even; NaN to any NaN

constexpr size_t BLOCK = 64;

// Returns first ? a : b without a branch.
inline uint32_t choose(bool first, uint32_t a, uint32_t b) {
    const uint32_t all = 0u - uint32_t(first);
    return (a & all) | (b & ~all);
}

inline bool finite(float v) { return int32_t(magnitude(bit_cast<uint32_t>(v))) < int32_t(F32::infinity); }

// A block of 64 values as bfloat16 or float16: finite values remain finite, NaN become the quiet one.
template <class Format>
struct Half {
    using Sent = typename Format::Bits;
    static constexpr size_t shared = 0;
    static constexpr uint8_t exponent = 0, MAX_EXPONENT = 0;
    explicit Half(const float*) {}
    explicit Half(uint8_t) {}

    static void narrow(const float* v, Sent* sent) {
        narrow_block(Format{}, v, sent);
        for (size_t i = 0; i < BLOCK; i++) {
            const Sent m = magnitude(sent[i]);
            const Sent bits = Sent(sent[i] - ((m == Format::infinity) & finite(v[i])));
            sent[i] = Sent(choose(m > Format::infinity, Format::nan, bits));
        }
    }
    static void widen(const Sent* sent, float* v) { widen_block(Format{}, sent, v); }
    static void round(const float* v, float* rounded) {
        Sent sent[BLOCK];
        narrow(v, sent);
        widen(sent, rounded);
    }
};

// A block of 64 values as q * 2^e, with the smallest e from -126 to 121 for which no finite value exceeds 126 * 2^e. Only the
// largest floats exceed 126 * 2^121, and become it. Infinities and NaN have special values of q.
struct Int8 {
    using Sent = int8_t;
    static constexpr size_t shared = 1;
    static constexpr uint8_t MAX_EXPONENT = 247;  // of `exponent`
    static constexpr Sent nan = -128;
    static constexpr int32_t infinity = 127;      // -127 is the negative one
    static constexpr float integers = 0x1.8p23f;  // adding it rounds to an integer, because floats near it are integers
    uint8_t exponent;                             // e + 126, as in messages

    explicit Int8(uint8_t exponent_) : exponent(exponent_) {}
    explicit Int8(const float* v) {
        int32_t max_bits = 0;
        for (size_t i = 0; i < BLOCK; i++) {
            const auto m = int32_t(magnitude(bit_cast<uint32_t>(v[i])));
            const int32_t finite = m < int32_t(F32::infinity) ? m : 0;
            max_bits = finite > max_bits ? finite : max_bits;
        }
        const int32_t up = ((max_bits + 0x3ffff) >> 23) - 7;  // 126 is 2^6 with the mantissa 0x7c0000
        exponent = uint8_t(up < 0 ? 0 : up > MAX_EXPONENT ? MAX_EXPONENT : up);
    }
    float scale() const { return bit_cast<float>(uint32_t(exponent + 1) << 23); }
    float inverse() const { return bit_cast<float>(uint32_t(253 - exponent) << 23); }

    void narrow(const float* v, Sent* sent) const {
        const float from = inverse();
        for (size_t i = 0; i < BLOCK; i++) {
            int32_t q = int32_t(bit_cast<uint32_t>(v[i] * from + integers) - bit_cast<uint32_t>(integers));
            const int32_t limit = infinity - finite(v[i]);
            q = q > limit ? limit : q;
            q = q < -limit ? -limit : q;
            sent[i] = Sent(choose(v[i] == v[i], uint32_t(q), uint32_t(int32_t(nan))));
        }
    }
    void widen(const Sent* sent, float* v) const {
        const float to = scale();
        for (size_t i = 0; i < BLOCK; i++) {
            const int32_t q = sent[i];
            const uint32_t infinite = F32::infinity | (uint32_t(q) & 0x80000000u);
            const uint32_t beyond = choose(q == nan, F32::nan, infinite);
            v[i] = bit_cast<float>(choose(uint32_t(q + 126) <= 252, bit_cast<uint32_t>(float(q) * to), beyond));
        }
    }
    void round(const float* v, float* rounded) const {  // like narrow, then widen, but infinities remain floats
        const float from = inverse(), to = scale();
        for (size_t i = 0; i < BLOCK; i++) {
            const float limit = bit_cast<float>(choose(finite(v[i]), bit_cast<uint32_t>(126.0f), F32::infinity));
            float q = v[i] * from + integers - integers;
            q = q > limit ? limit : q;
            q = q < -limit ? -limit : q;
            rounded[i] = bit_cast<float>(choose(v[i] == v[i], bit_cast<uint32_t>(q * to), F32::nan));
        }
    }
};

template <class Coder>
void pack_values(const float* values, size_t count, char* out) {
    using Sent = typename Coder::Sent;
    Sent sent[BLOCK];
    const auto block = [&](const float* v, size_t begin) {
        const Coder coder(v);
        coder.narrow(v, sent);
        if (Coder::shared) out[count + begin / BLOCK] = char(coder.exponent);
    };
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        block(values + i, i);
        memcpy(out + i * sizeof(Sent), sent, sizeof sent);
    }
    if (i == count) return;
    float last[BLOCK] = {};
    memcpy(last, values + i, (count - i) * sizeof(float));
    block(last, i);
    memcpy(out + i * sizeof(Sent), sent, (count - i) * sizeof(Sent));
}

template <class Coder>
const char* unpack_values(const char* data, size_t count, float* values) {
    using Sent = typename Coder::Sent;
    Sent sent[BLOCK];
    bool good = true;
    const auto block = [&](size_t begin, float* v) {
        const uint8_t exponent = Coder::shared ? uint8_t(data[count + begin / BLOCK]) : 0;
        const bool known = exponent <= Coder::MAX_EXPONENT;
        good &= known;
        const Coder coder(uint8_t(known ? exponent : 0));
        coder.widen(sent, v);
    };
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        memcpy(sent, data + i * sizeof(Sent), sizeof sent);
        block(i, values + i);
    }
    const auto fault = [&] { return good ? nullptr : "an exponent that no value has"; };
    if (i == count) return fault();
    float last[BLOCK];
    memset(sent, 0, sizeof sent);
    memcpy(sent, data + i * sizeof(Sent), (count - i) * sizeof(Sent));
    block(i, last);
    memcpy(values + i, last, (count - i) * sizeof(float));
    return fault();
}

template <class Coder>
size_t quantize_values(const float* values, size_t count, float* rounded, float* errors) {
    float to[BLOCK];
    uint32_t zeros = 0;
    const auto block = [&](const float* v, float* rounded_, float* errors_) {
        const Coder coder(v);
        coder.round(v, to);
        for (size_t i = 0; i < BLOCK; i++) {
            const float error = v[i] - to[i];
            rounded_[i] = to[i] + 0.0f;  // -0 becomes 0
            errors_[i] = bit_cast<float>(choose(finite(v[i]), bit_cast<uint32_t>(error), 0));
        }
    };
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) block(values + i, rounded + i, errors + i);
    if (i < count) {
        float last[BLOCK] = {}, last_rounded[BLOCK], last_errors[BLOCK];
        memcpy(last, values + i, (count - i) * sizeof(float));
        block(last, last_rounded, last_errors);
        memcpy(rounded + i, last_rounded, (count - i) * sizeof(float));
        memcpy(errors + i, last_errors, (count - i) * sizeof(float));
    }
    for (i = 0; i < count; i++) zeros += rounded[i] == 0;
    return zeros;
}

template <class Coder>
constexpr ValueCodec value_codec() {
    return {sizeof(typename Coder::Sent), 0, Coder::shared ? BLOCK : 0, Coder::shared, false,
            pack_values<Coder>, unpack_values<Coder>, quantize_values<Coder>};
}

inline bool all_finite(const float* values, size_t count) {
    int32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        const auto m = int32_t(magnitude(bit_cast<uint32_t>(values[i])));
        largest = m > largest ? m : largest;
    }
    return largest < int32_t(F32::infinity);
}
