// The loops over elements. Included by scan_*.cpp after their primitives, inside a namespace per instruction set. V is a vector
// of 8 words, and Counts is a vector of 2 to 8 words.
//   void planes<PLANES>(const uint8_t* label, uint64_t* plane)   puts bit k of 64 labels into plane[8 * k]
//   Counts counts(V bits)                                        words that add up to the number of set bits
//   void add_lanes(const Counts* sums, const uint16_t* before, uint16_t* after)
//       adds up each of 4 vectors, whose words have 4 fields of 16 bits, and adds the 4 sums to 16 numbers
//   size_t find(V bits, unsigned r)                              the position of set bit r
//   unsigned count_below(V bits, unsigned end)                   how many of the first `end` bits are set
//   size_t last_up_to(const uint16_t* sorted, unsigned limit)    index of the last of 16 numbers up to `limit`; the first is
//   uint64_t hash_block(const uint8_t* block)                    see `hash_word`

constexpr size_t CHUNK = 1024;  // elements
constexpr size_t AHEAD = 2;     // chunks whose memory is requested before they are used

// Writes the exponents of CHUNK elements of a type with at most 8 bits of exponent. Shifts words of 16 bits, since SIMD has no
// shifts of bytes.
typedef uint16_t Words __attribute__((vector_size(64)));
typedef uint8_t Half __attribute__((vector_size(32)));
inline void exponents(const uint16_t* element, unsigned shift, uint32_t mask, uint8_t* out) {
    for (size_t i = 0; i < CHUNK; i += 32) {
        Words words;
        std::memcpy(&words, element + i, sizeof words);
        const Half bytes = __builtin_convertvector((words >> shift) & uint16_t(mask), Half);
        std::memcpy(out + i, &bytes, sizeof bytes);
    }
}
inline void exponents(const uint8_t* element, unsigned shift, uint32_t mask, uint8_t* out) {
    for (size_t i = 0; i < CHUNK; i += 64) {
        Words words;
        std::memcpy(&words, element + i, sizeof words);
        words = (words >> shift) & uint16_t(mask * 0x101);
        std::memcpy(out + i, &words, sizeof words);
    }
}

// Writes the classes of CHUNK elements.
template <class U>
inline void classify(const U* element, const Elements& e, uint8_t* label) {
    if constexpr (sizeof(U) <= 2) {
        exponents(element, e.shift, e.mask, label);
        const uint8_t low = uint8_t(std::min(e.low, 255u));
        for (size_t i = 0; i < CHUNK; i++) label[i] = std::min(uint8_t(std::max(label[i], low) - low), uint8_t(CLASSES - 1));
    } else {
        const U mask = e.mask, low = e.low;
        for (size_t i = 0; i < CHUNK; i++) {
            const U above = std::max(U(element[i] >> e.shift & mask), low) - low;
            label[i] = uint8_t(std::min(above, U(CLASSES - 1)));
        }
    }
}

// Returns the elements from i on. If there are fewer than CHUNK, returns a copy padded with zeros.
template <class U>
inline const U* chunk(const U* data, size_t i, size_t n, U* room) {
    if (n - i >= CHUNK) return data + i;
    std::memcpy(room, data + i, (n - i) * sizeof(U));
    std::memset(room + (n - i), 0, (CHUNK - (n - i)) * sizeof(U));
    return room;
}

// Copies a chunk, faster than memcpy, which GCC turns into a slow instruction.
template <class U>
inline void copy(const U* from, U* to) {
    for (size_t i = 0; i < CHUNK; i += 256 / sizeof(U)) {
        V words[4];
        std::memcpy(words, from + i, sizeof words);
        std::memcpy(to + i, words, sizeof words);
        asm volatile("" ::: "memory");
    }
}

// Prefetches the elements of a tensor, and of another one. Does so a few cache lines at a time: more would wait for each other,
// and delay later loads.
template <class U>
struct Ahead {
    const U *next, *end;
    ptrdiff_t other;  // bytes from this tensor to the other one

    void request(size_t lines) {
        asm volatile("");  // GCC deletes calls of functions that only prefetch
        for (; lines && next < end; lines--, next += 64 / sizeof(U)) {
            __builtin_prefetch(next, 0, 2);
            if (other) __builtin_prefetch(reinterpret_cast<const char*>(next) + other, 0, 2);
        }
    }
};

template <class U>
inline uint64_t hash_blocks(const U* data, size_t n, size_t first_block) {
    uint64_t sum = 0;
    const auto* bytes = reinterpret_cast<const uint8_t*>(data);
    for (size_t at = 0; at < n * sizeof(U); at += BLOCK) sum += mix_block(hash_block(bytes + at), first_block + at / BLOCK);
    return sum;
}

// An index of the elements of a tile by class and rank. Each element has a bit in each plane: 4 planes for its class, one for
// whether it has changed. `before` counts the elements of each class in the units before each unit.
struct Tile {
    static constexpr size_t UNIT = 512, UNITS = 16, SIZE = UNIT * UNITS;  // elements
    uint64_t plane[UNITS][5][8];
    alignas(64) uint16_t before[CLASSES][UNITS], total[CLASSES];
    size_t units = 0;

    // Adds CHUNK elements.
    template <unsigned PLANES, class U>
    void add(const uint8_t* label, Ahead<U>& ahead) {
        for (size_t end = units + CHUNK / UNIT; units < end; units++)
            for (size_t g = 0; g < 8; g++, label += 64) {
                planes<PLANES>(label, &plane[units][0][g]);
                ahead.request(sizeof(U));
            }
    }
    // Computes `before` and `total`, after all of the tile's `size` elements have been added.
    void count(size_t size) {
        alignas(32) uint16_t so_far[UNITS + 1][CLASSES] = {};
        for (size_t u = 0; u < units; u++) {
            V p[4];
            Counts sum[4];
            std::memcpy(p, plane[u], sizeof p);
            for (unsigned q = 0; q < 4; q++) {
                const V high = (q & 2 ? p[3] : ~p[3]) & (q & 1 ? p[2] : ~p[2]), odd = high & p[0], even = high & ~p[0];
                sum[q] = counts(even & ~p[1]) | counts(odd & ~p[1]) << 16 | counts(even & p[1]) << 32 | counts(odd & p[1]) << 48;
            }
            add_lanes(sum, so_far[u], so_far[u + 1]);
        }
        for (size_t u = units; u < UNITS; u++) std::memcpy(so_far[u + 1], so_far[u], sizeof so_far[u]);
        for (unsigned c = 0; c < CLASSES; c++)
            for (size_t u = 0; u < UNITS; u++) before[c][u] = so_far[u][c];
        std::memcpy(total, so_far[UNITS], sizeof total);
        total[0] = uint16_t(total[0] - (units * UNIT - size));
    }
    // Returns which elements of a unit are of a class.
    V members(size_t u, unsigned c) const {
        V p[4];
        std::memcpy(p, plane[u], sizeof p);
        for (unsigned k = 0; k < 4; k++) p[k] ^= uint64_t(c >> k & 1) - 1;
        return p[0] & p[1] & p[2] & p[3];
    }
    // Returns the place of the element of class c with a rank, which must exist.
    size_t place(unsigned c, unsigned rank) const {
        const size_t u = last_up_to(before[c], rank);
        return UNIT * u + find(members(u, c), rank - before[c][u]);
    }
    // Returns the rank of the element at a place of class c.
    unsigned rank(unsigned c, size_t place) const {
        const size_t u = place / UNIT;
        return before[c][u] + count_below(members(u, c), unsigned(place % UNIT));
    }
};

template <class U>
void compare(const void* before, const void* after, size_t n, Elements e, size_t first_block, Sums* sums, uint32_t* members,
             Scan::Found* found) {
    alignas(64) U x_room[CHUNK], y_room[CHUNK];
    alignas(64) uint8_t label[CHUNK];
    uint16_t changed[Tile::SIZE + 3];  // places in a tile
    Tile tile;
    size_t o = found->count;
    const ptrdiff_t other = static_cast<const char*>(after) - static_cast<const char*>(before);
    Ahead<U> ahead{static_cast<const U*>(before) + AHEAD * CHUNK, nullptr, other};
    for (size_t begin = 0; begin < n; begin += Tile::SIZE) {
        const U *x = static_cast<const U*>(before) + begin, *y = static_cast<const U*>(after) + begin;
        const size_t size = std::min(n - begin, Tile::SIZE);
        size_t changes = 0;
        tile.units = 0;
        for (size_t i = 0; i < size; i += CHUNK) {
            const U *old = chunk(x, i, size, x_room), *fresh = chunk(y, i, size, y_room);
            ahead.end = x + std::min(n - begin, i + (AHEAD + 1) * CHUNK);
            classify(old, e, label);
            for (size_t j = 0; j < CHUNK; j++) label[j] = uint8_t(label[j] | (old[j] != fresh[j] ? 16 : 0));
            tile.add<5>(label, ahead);
            const size_t first = changes;
            for (size_t g = i / 64; g < (i + CHUNK) / 64; g++) {
                uint64_t differs = tile.plane[g / 8][4][g % 8];
                uint16_t* out = changed + changes;
                changes += size_t(__builtin_popcountll(differs));
                do  // always writes 3 at once, without a branch; later ones overwrite those in excess
                    for (unsigned k = 0; k < 3; k++, differs &= differs - 1)
                        *out++ = uint16_t(64 * g + size_t(__builtin_ctzll(differs | uint64_t(1) << 63)));
                while (differs);
            }
            const size_t elements = std::min(size - i, CHUNK), block = first_block + (begin + i) * sizeof(U) / BLOCK;
            const uint64_t hash = hash_blocks(old, elements, block);
            sums->before += hash;
            sums->after += changes == first ? hash : hash_blocks(fresh, elements, block);
        }
        tile.count(size);
        if (found->rank.size() < o + changes) {
            const size_t room = 2 * (o + changes);
            found->label.resize(room), found->rank.resize(room), found->distance.resize(room);
        }
        for (size_t j = 0; j < changes; j++, o++) {
            const size_t i = changed[j];
            const uint8_t c = uint8_t(class_of(x[i], e.shift, e.mask, e.low));
            found->label[o] = c;
            found->rank[o] = members[c] + tile.rank(c, i);
            const U step = U(ordered(y[i], e.is_float) - ordered(x[i], e.is_float));
            found->distance[o] = uint64_t(int64_t(std::make_signed_t<U>(step)));
        }
        for (unsigned c = 0; c < CLASSES; c++) members[c] += tile.total[c];
    }
    found->count = o;
}

template <class U>
bool locate(const void* before, size_t n, Elements e, size_t first_block, const Changes& changes, Sums* sums, Located* located) {
    constexpr size_t BLOCKS = Tile::SIZE * sizeof(U) / BLOCK;
    alignas(64) U room[Tile::SIZE];  // the tile's elements, old and then new
    alignas(64) uint8_t label[CHUNK];
    uint64_t hash[BLOCKS];
    U distance[Tile::SIZE];
    Tile tile;
    uint32_t members[CLASSES] = {};
    size_t at[CLASSES], end[CLASSES], total = 0, o = 0;
    Ahead<U> ahead{static_cast<const U*>(before), nullptr, 0};
    for (unsigned c = 0; c < CLASSES; c++) at[c] = total, end[c] = total += changes.count[c];
    located->position.resize(total);
    located->value.resize(total * sizeof(U));
    uint32_t* position = located->position.data();
    uint8_t* value = located->value.data();
    for (size_t begin = 0; begin < n; begin += Tile::SIZE) {
        const U* x = static_cast<const U*>(before) + begin;
        const size_t size = std::min(n - begin, Tile::SIZE), block = first_block + begin * sizeof(U) / BLOCK;
        const size_t blocks = (size * sizeof(U) + BLOCK - 1) / BLOCK;
        tile.units = 0;
        ahead.end = x + std::min(n - begin, 3 * Tile::SIZE);
        for (size_t i = 0; i < size; i += CHUNK) {
            U* old = room + i;
            if (size - i >= CHUNK)
                copy(x + i, old);
            else
                chunk(x, i, size, old);
            classify(old, e, label);
            tile.add<4>(label, ahead);
            for (size_t b = i * sizeof(U) / BLOCK, j = 0; j < CHUNK * sizeof(U) / BLOCK; j++)
                hash[b + j] = hash_block(reinterpret_cast<const uint8_t*>(old) + j * BLOCK);
        }
        tile.count(size);
        const size_t first = o;
        for (unsigned c = 0; c < CLASSES; c++) {
            const uint32_t reached = members[c] + tile.total[c];
            size_t k = at[c];
            for (; k < end[c] && changes.rank[k] < reached; k++, o++) {
                position[o] = uint32_t(begin + tile.place(c, changes.rank[k] - members[c]));
                distance[o - first] = U(changes.distance[k]);
                ahead.request(1);
            }
            at[c] = k;
            members[c] = reached;
        }
        bool touched[BLOCKS] = {};
        for (size_t j = first; j < o; j++) {
            const size_t i = position[j] - begin;
            room[i] = unordered(U(ordered(room[i], e.is_float) + distance[j - first]), e.is_float);
            touched[i * sizeof(U) / BLOCK] = true;
            std::memcpy(value + j * sizeof(U), &room[i], sizeof(U));
        }
        for (size_t b = 0; b < blocks; b++) {
            const uint64_t mixed = mix_block(hash[b], block + b);
            sums->before += mixed;
            const auto* bytes = reinterpret_cast<const uint8_t*>(room) + b * BLOCK;
            sums->after += touched[b] ? mix_block(hash_block(bytes), block + b) : mixed;
        }
    }
    for (unsigned c = 0; c < CLASSES; c++)
        if (at[c] < end[c] || (changes.members[c] && changes.members[c] != members[c])) return false;
    return true;
}

uint64_t sum(const uint8_t* data, size_t bytes, size_t first_block) {
    alignas(64) uint8_t room[CHUNK];
    Ahead<uint8_t> ahead{data + AHEAD * BLOCK, nullptr, 0};
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i += BLOCK) {
        ahead.end = data + std::min(bytes, i + (AHEAD + 1) * BLOCK), ahead.request(BLOCK / 64);
        sum += mix_block(hash_block(chunk(data, i, bytes, room)), first_block++);
    }
    return sum;
}

constexpr Scan table(const char* name) {
    return {name, sum,
            {compare<uint8_t>, compare<uint16_t>, compare<uint32_t>, compare<uint64_t>},
            {locate<uint8_t>, locate<uint16_t>, locate<uint32_t>, locate<uint64_t>}};
}
