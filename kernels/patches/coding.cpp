// The bits of a piece. Sets of ranks are coded as gaps in Rice codes, whose parameter is sent: the gaps between changes that are
// equally likely have a geometric distribution, for which such codes are within a few per cent of the entropy (Golomb 1966;
// Gallager and Van Voorhis 1975). If a set contains more than half of the elements, the elements outside it are coded.
#include <cstring>

#include "patches.hpp"

namespace sparsecomm {
namespace patches {

namespace {

constexpr unsigned ESCAPE = 24;      // from this quotient on, the number itself follows
constexpr unsigned PARAMETER = 6;    // bits of a parameter of Rice codes
constexpr unsigned LENGTH = 6;       // bits of a number's length
constexpr unsigned LEVELS = 64;      // sets of larger and larger numbers
constexpr size_t FEW = 128;          // below this count, Rice codes take fewer bits than sets and their descriptions
constexpr size_t PADDING = 16;       // bytes that may be read after the end

unsigned length_of(uint64_t number) { return number ? 64 - unsigned(__builtin_clzll(number)) : 0; }
uint64_t low_bits(uint64_t bits, unsigned width) { return width < 64 ? bits & ((uint64_t(1) << width) - 1) : bits; }

class Writer {
  public:
    explicit Writer(std::vector<uint8_t>& out) : out_(out), size_(out.size()) {}

    void put(uint64_t bits, unsigned width) {
        if (width > 32) {
            put(low_bits(bits, 32), 32);
            bits >>= 32, width -= 32;
        }
        room_ |= bits << used_;
        used_ += width;
        if (used_ >= 32) {
            store(4);
            room_ >>= 32, used_ -= 32;
        }
    }
    void number(uint64_t value) {  // below 2^63
        put(length_of(value), LENGTH);
        put(value, length_of(value));
    }
    void rice(uint64_t value, unsigned parameter) {
        const uint64_t quotient = value >> parameter;
        if (quotient < ESCAPE && quotient + parameter < 32) {
            put((low_bits(value, parameter) << 1 | 1) << quotient, unsigned(quotient) + 1 + parameter);
        } else if (quotient < ESCAPE) {
            put(uint64_t(1) << quotient, unsigned(quotient) + 1);
            put(low_bits(value, parameter), parameter);
        } else {
            put(uint64_t(1) << ESCAPE, ESCAPE + 1);
            put(length_of(value) - 1, LENGTH);
            put(value, length_of(value));
        }
    }
    void finish() {
        store((used_ + 7) / 8);
        out_.resize(size_);
    }

  private:
    void store(size_t bytes) {
        if (out_.size() < size_ + 8) out_.resize(2 * size_ + 64);
        std::memcpy(out_.data() + size_, &room_, 8);
        size_ += bytes;
    }
    std::vector<uint8_t>& out_;
    size_t size_;
    uint64_t room_ = 0;
    unsigned used_ = 0;
};

// Reads zeros after the end; then failed() is true.
class Reader {
  public:
    Reader(const uint8_t* data, size_t bytes) : data_(data), next_(data), last_(data + bytes + PADDING - 8), bytes_(bytes) {}

    uint64_t get(unsigned width) {
        if (width > 32) {
            const uint64_t low = get(32);
            return low | get(width - 32) << 32;
        }
        fill();
        const uint64_t bits = low_bits(room_, width);
        skip(width);
        return bits;
    }
    uint64_t number() { return get(unsigned(get(LENGTH))); }
    uint64_t rice(unsigned parameter) {
        fill();
        const unsigned quotient = unsigned(__builtin_ctzll(room_ | uint64_t(1) << (ESCAPE + 1)));
        if (quotient < ESCAPE && parameter <= 32) {
            const uint64_t rest = low_bits(room_ >> (quotient + 1), parameter);
            skip(quotient + 1 + parameter);
            return uint64_t(quotient) << parameter | rest;
        }
        skip(quotient + 1);
        if (quotient < ESCAPE) return uint64_t(quotient) << parameter | get(parameter);
        failed_ |= quotient > ESCAPE;
        return get(unsigned(get(LENGTH)) + 1);
    }
    bool failed() const { return failed_ || position() > 8 * bytes_; }
    bool is_complete() const { return !failed() && (position() + 7) / 8 == bytes_; }

  private:
    size_t position() const { return 8 * size_t(next_ - data_) - held_; }
    void fill() {  // to at least 56 bits. Higher bits already belong to the next byte
        uint64_t bits;
        std::memcpy(&bits, next_, 8);
        room_ |= bits << held_;
        next_ += (63 - held_) / 8;
        held_ |= 56;
        if (next_ > last_) next_ = last_;
    }
    void skip(unsigned width) { room_ >>= width, held_ -= width; }

    const uint8_t *data_, *next_, *last_;
    size_t bytes_;
    uint64_t room_ = 0;
    unsigned held_ = 0;  // bits
    bool failed_ = false;
};

template <class T>
uint64_t bits_with(const T* values, size_t count, unsigned parameter) {
    uint64_t bits = 0;
    for (size_t i = 0; i < count; i++) {
        const T quotient = values[i] >> parameter;
        bits += quotient < ESCAPE ? quotient : T(ESCAPE + LENGTH + 16);
    }
    return bits + count * (parameter + 1);
}

// Writes numbers in Rice codes with the best parameter, found by descent from the one for their mean.
template <class T>
void put_numbers(Writer& writer, const T* values, size_t count) {
    if (!count) return;
    double total = 0;
    for (size_t i = 0; i < count; i++) total += double(values[i]);
    unsigned best = length_of(uint64_t(0.7 * total / double(count)));
    best = best > 1 ? best - 1 : 0;
    uint64_t bits = bits_with(values, count, best), tried;
    while (best > 0 && (tried = bits_with(values, count, best - 1)) < bits) bits = tried, best--;
    while (best < 62 && (tried = bits_with(values, count, best + 1)) < bits) bits = tried, best++;
    writer.put(best, PARAMETER);
    for (size_t i = 0; i < count; i++) writer.rice(values[i], best);
}

// Writes a set of `count` increasing numbers below `size`: the gaps between them or, with `others`, between
// the numbers outside the set.
void put_set(Writer& writer, const uint32_t* set, size_t count, size_t size, bool others, std::vector<uint32_t>& gaps) {
    gaps.clear();
    uint32_t next = 0;
    if (!others) {
        for (size_t i = 0; i < count; i++) gaps.push_back(set[i] - next), next = set[i] + 1;
    } else {
        uint32_t gap = 0;
        for (size_t i = 0; i <= count; i++) {
            const uint32_t end = i < count ? set[i] : uint32_t(size);
            for (; next < end; next++) gaps.push_back(gap), gap = 0;
            next = end + 1, gap++;
        }
    }
    put_numbers(writer, gaps.data(), gaps.size());
}

// Reads what put_set has written. Returns false if a number is not below `size`.
bool get_set(Reader& from, uint32_t* set, size_t count, size_t size, bool others) {
    Reader reader = from;  // in registers
    const size_t coded = others ? size - count : count;
    const unsigned parameter = coded ? unsigned(reader.get(PARAMETER)) : 0;
    uint64_t next = 0;  // the first number after the ones so far
    uint32_t* out = set;
    for (size_t i = 0; i < coded; i++) {
        const uint64_t gap = reader.rice(parameter);
        if (gap > size - next - (coded - i) || reader.failed()) return false;  // leaves no room for the following numbers
        if (others)
            for (uint64_t end = next + gap; next < end;) *out++ = uint32_t(next++);
        else
            *out++ = uint32_t(next += gap);
        next++;
    }
    if (others)
        while (next < size) *out++ = uint32_t(next++);
    from = reader;
    return true;
}

// Writes numbers, whose distribution is rarely geometric. First come their low bits. Then, with these bits removed, come the
// sets of the numbers larger than 0, 1, 2 ... The last few numbers are in Rice codes.
void put_values(Writer& writer, const uint64_t* values, size_t count, std::vector<uint32_t>& set, std::vector<uint32_t>& gaps) {
    double total = 0;
    for (size_t i = 0; i < count; i++) total += double(values[i]);
    const unsigned low = length_of(uint64_t(total / double(count))) > 4 ? length_of(uint64_t(total / double(count))) - 3 : 0;
    writer.put(low, PARAMETER);
    std::vector<uint64_t> rest(values, values + count);
    for (uint64_t& value : rest) writer.put(low_bits(value, low), low), value >>= low;
    for (unsigned level = 0; level < LEVELS && !rest.empty(); level++) {
        const bool is_last = level + 1 == LEVELS || rest.size() < FEW;
        writer.put(is_last, 1);
        if (is_last) return put_numbers(writer, rest.data(), rest.size());
        set.clear();
        for (size_t i = 0; i < rest.size(); i++)
            if (rest[i]) set.push_back(uint32_t(i));
        writer.number(set.size());
        put_set(writer, set.data(), set.size(), rest.size(), 2 * set.size() > rest.size(), gaps);
        for (size_t i = 0; i < set.size(); i++) rest[i] = rest[set[i]] - 1;
        rest.resize(set.size());
    }
}

// Reads what put_values has written, into `values` that are 0. Returns false if the bits are damaged.
bool get_values(Reader& reader, uint64_t* values, size_t count, std::vector<uint32_t>& set) {
    const unsigned low = unsigned(reader.get(PARAMETER));
    for (size_t i = 0; low && i < count; i++) values[i] = reader.get(low);
    std::vector<uint32_t> rest(count);
    for (size_t i = 0; i < count; i++) rest[i] = uint32_t(i);
    for (unsigned level = 0; level < LEVELS && !rest.empty() && !reader.failed(); level++) {
        if (reader.get(1)) {
            const unsigned parameter = unsigned(reader.get(PARAMETER));
            Reader fast = reader;  // in registers
            for (const uint32_t i : rest) values[i] += fast.rice(parameter) << low;
            reader = fast;
            return !reader.failed();
        }
        const uint64_t larger = reader.number();
        if (larger > rest.size()) return false;
        set.resize(larger);
        if (!get_set(reader, set.data(), larger, rest.size(), 2 * larger > rest.size())) return false;
        for (size_t i = 0; i < larger; i++) rest[i] = rest[set[i]];
        rest.resize(larger);
        for (const uint32_t i : rest) values[i] += uint64_t(1) << low;
    }
    return rest.empty() && !reader.failed();
}

}  // namespace

void encode(const Changes& changes, std::vector<uint8_t>& out) {
    if (changes.rank.empty()) return;
    Writer writer(out);
    uint32_t present = 0;
    for (unsigned c = 0; c < CLASSES; c++) present |= uint32_t(changes.count[c] > 0) << c;
    writer.put(present, CLASSES);
    std::vector<uint32_t> set, gaps;
    std::vector<uint64_t> more;
    size_t begin = 0;
    for (unsigned c = 0; c < CLASSES; begin += changes.count[c], c++) {
        const size_t count = changes.count[c];
        if (!count) continue;
        const bool others = 2 * count > changes.members[c];
        writer.number(count);
        writer.put(others, 1);
        if (others) writer.number(changes.members[c]);
        put_set(writer, changes.rank.data() + begin, count, changes.members[c], others, gaps);
        more.clear();
        const uint64_t* distance = changes.distance.data() + begin;
        for (size_t i = 0; i < count; i++) {
            const bool down = distance[i] >> 63;
            const uint64_t steps = down ? -distance[i] : distance[i];
            writer.put(down, 1);
            more.push_back(steps - 1);
        }
        put_values(writer, more.data(), count, set, gaps);
    }
    writer.finish();
}

bool decode(const uint8_t* data, size_t bytes, size_t size, Changes& changes) {
    for (unsigned c = 0; c < CLASSES; c++) changes.members[c] = changes.count[c] = 0;
    changes.rank.clear(), changes.distance.clear();
    if (!bytes) return true;
    std::vector<uint8_t> padded(data, data + bytes);
    padded.insert(padded.end(), PADDING, 0);
    Reader reader(padded.data(), bytes);
    const uint64_t present = reader.get(CLASSES);
    std::vector<uint32_t> set;
    std::vector<uint8_t> signs;
    size_t begin = 0;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!(present >> c & 1)) continue;
        const uint64_t count = reader.number();
        const bool others = reader.get(1);
        const uint64_t members = others ? reader.number() : 0;
        if (!count || count > size - begin || (others && (members < count || members > size))) return false;
        changes.count[c] = uint32_t(count), changes.members[c] = uint32_t(members);
        changes.rank.resize(begin + count), changes.distance.resize(begin + count);
        if (!get_set(reader, changes.rank.data() + begin, count, others ? members : size, others)) return false;
        uint64_t* distance = changes.distance.data() + begin;
        signs.resize(count);
        for (size_t i = 0; i < count; i += 32) {
            uint64_t down = reader.get(unsigned(count - i < 32 ? count - i : 32));
            for (size_t j = i; j < count && j < i + 32; j++, down >>= 1) signs[j] = down & 1;
        }
        std::memset(distance, 0, count * sizeof *distance);
        if (reader.failed() || !get_values(reader, distance, count, set)) return false;
        for (size_t i = 0; i < count; i++) distance[i] = signs[i] ? ~distance[i] : distance[i] + 1;
        begin += count;
    }
    return reader.is_complete() && begin > 0;
}

}  // namespace patches
}  // namespace sparsecomm
