#include "patches.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>

#include "../cpu/pool.hpp"
#include "../cpu/processor.hpp"
#include "hash.hpp"

namespace sparsecomm {
namespace patches {

namespace {

const Scan* best() {
#if defined(__x86_64__)
    if (supports("avx512_vpopcntdq")) return &avx512_scan;
    if (supports("avx2")) return &avx2_scan;
#endif
    return &portable_scan;
}

std::atomic<const Scan*> chosen{best()};
constexpr size_t AHEAD = 32;  // writes for which memory is prefetched

// Calls work(piece, first element, elements, sums) for all pieces, and adds up the sums. Throws std::bad_alloc if one did.
template <class Work>
void for_each_piece(size_t n, int threads, Sums* sums, const Work& work) {
    const size_t pieces = (n + PIECE - 1) / PIECE;
    std::vector<Sums> of_piece(pieces);
    std::atomic<bool> no_memory{false};
    parallel(pieces, threads, [&](size_t p) {
        try {
            const size_t begin = p * PIECE, size = n - begin < PIECE ? n - begin : PIECE;
            work(p, begin, size, &of_piece[p]);
        } catch (const std::bad_alloc&) {
            no_memory = true;
        }
    });
    if (no_memory) throw std::bad_alloc();
    *sums = {};
    for (const Sums& sum : of_piece) sums->before += sum.before, sums->after += sum.after;
}

unsigned index_of(size_t itemsize) { return itemsize == 1 ? 0 : itemsize == 2 ? 1 : itemsize == 4 ? 2 : 3; }

// Sorts changes by class. Within a class, they are already in the order of ranks.
void sort(const uint8_t* label, const uint32_t* rank, const uint64_t* distance, size_t count, Changes& changes) {
    size_t at[CLASSES], total = 0;
    std::memset(changes.count, 0, sizeof changes.count);
    for (size_t i = 0; i < count; i++) changes.count[label[i]]++;
    for (unsigned c = 0; c < CLASSES; c++) at[c] = total, total += changes.count[c];
    changes.rank.resize(total), changes.distance.resize(total);
    for (size_t i = 0; i < count; i++) {
        const size_t o = at[label[i]]++;
        changes.rank[o] = rank[i], changes.distance[o] = distance[i];
    }
}

}  // namespace

uint64_t digest_of(uint64_t sum, size_t bytes) { return mix(sum + mix(bytes + GOLDEN)); }

uint64_t sum_of_blocks(const void* data, size_t bytes, int threads) {
    Sums sums;
    const auto* begin = static_cast<const uint8_t*>(data);
    const Scan& scan = *chosen.load();
    for_each_piece(bytes, threads, &sums, [&](size_t, size_t at, size_t size, Sums* sum) {
        sum->before = scan.sum(begin + at, size, at / BLOCK);
    });
    return sums.before;
}

std::vector<uint8_t> join(const std::vector<std::vector<uint8_t>>& pieces) {
    size_t bytes = 0, at = 4 * pieces.size();
    for (const auto& piece : pieces) bytes += piece.size();
    std::vector<uint8_t> out(bytes ? at + bytes : 0);
    for (size_t p = 0; bytes && p < pieces.size(); at += pieces[p].size(), p++) {
        const uint32_t length = uint32_t(pieces[p].size());
        std::memcpy(out.data() + 4 * p, &length, 4);
        std::copy(pieces[p].begin(), pieces[p].end(), out.begin() + std::ptrdiff_t(at));
    }
    return out;
}

// Finds where each piece begins. Returns false if the lengths do not add up.
bool split(const uint8_t* coded, size_t bytes, size_t pieces, std::vector<size_t>& begin) {
    begin.assign(pieces + 1, 0);
    if (!bytes) return true;
    if (bytes < 4 * pieces) return false;
    begin[0] = 4 * pieces;
    for (size_t p = 0; p < pieces; p++) {
        if (begin[p] > bytes) return false;
        uint32_t length;
        std::memcpy(&length, coded + 4 * p, 4);
        begin[p + 1] = begin[p] + length;
    }
    return begin[pieces] == bytes;
}

std::vector<uint8_t> diff(const void* before, const void* after, size_t n, Elements elements, int threads, Sums* sums,
                          size_t* changed) {
    const Scan& scan = *chosen.load();
    const size_t itemsize = elements.itemsize;
    std::atomic<size_t> count{0};
    std::vector<std::vector<uint8_t>> pieces((n + PIECE - 1) / PIECE);
    for_each_piece(n, threads, sums, [&](size_t p, size_t begin, size_t size, Sums* sum) {
        Scan::Found found{};
        Changes changes{};
        scan.compare[index_of(itemsize)](static_cast<const char*>(before) + begin * itemsize,
                                         static_cast<const char*>(after) + begin * itemsize, size, elements,
                                         begin * itemsize / BLOCK, sum, changes.members, &found);
        sort(found.label.data(), found.rank.data(), found.distance.data(), found.count, changes);
        encode(changes, pieces[p]);
        count += found.count;
    });
    *changed = count;
    return join(pieces);
}

void encode(const uint32_t* members, const uint64_t* starts, size_t pieces, const uint8_t* label, const uint32_t* rank,
            const uint64_t* distance, int threads, std::vector<std::vector<uint8_t>>* coded) {
    const size_t first = coded->size();
    coded->resize(first + pieces);
    Sums unused;
    for_each_piece(pieces * PIECE, threads, &unused, [&](size_t p, size_t, size_t, Sums*) {
        Changes changes;
        std::copy(members + p * CLASSES, members + (p + 1) * CLASSES, changes.members);
        const size_t at = starts[p] - starts[0];
        sort(label + at, rank + at, distance + at, starts[p + 1] - starts[p], changes);
        encode(changes, (*coded)[first + p]);
    });
}

bool decode(const uint8_t* coded, size_t bytes, size_t n, size_t first, size_t pieces, int threads,
            std::vector<Changes>* changes) {
    std::atomic<bool> fits{true};
    std::vector<size_t> at;
    if (!split(coded, bytes, (n + PIECE - 1) / PIECE, at)) return false;
    changes->resize(pieces);
    Sums unused;
    for_each_piece(std::min(n - first * PIECE, pieces * PIECE), threads, &unused, [&](size_t p, size_t, size_t size, Sums*) {
        const size_t begin = at[first + p], end = at[first + p + 1];
        if (!decode(coded + begin, end - begin, size, (*changes)[p])) fits = false;
    });
    return fits;
}

bool locate(const void* before, size_t n, Elements elements, const uint8_t* coded, size_t bytes, int threads, Sums* sums,
            std::vector<Located>* located) {
    const Scan& scan = *chosen.load();
    const size_t itemsize = elements.itemsize;
    const size_t pieces = (n + PIECE - 1) / PIECE;
    std::atomic<bool> fits{true};
    std::vector<size_t> at;
    if (!split(coded, bytes, pieces, at)) return false;
    located->assign(pieces, {});
    for_each_piece(n, threads, sums, [&](size_t p, size_t begin, size_t size, Sums* sum) {
        Changes changes;
        if (!decode(coded + at[p], at[p + 1] - at[p], size, changes) ||
            !scan.locate[index_of(itemsize)](static_cast<const char*>(before) + begin * itemsize, size, elements,
                                             begin * itemsize / BLOCK, changes, sum, &(*located)[p]))
            fits = false;
    });
    return fits;
}

void write(void* data, Elements elements, const std::vector<Located>& located, int threads) {
    const size_t itemsize = elements.itemsize;
    parallel(located.size(), threads, [&](size_t p) {
        auto* piece = static_cast<uint8_t*>(data) + p * PIECE * itemsize;
        const Located& changes = located[p];
        const uint8_t* value = changes.value.data();
        const size_t count = changes.position.size();
        for (size_t i = 0; i < count; i++, value += itemsize) {
            __builtin_prefetch(piece + changes.position[std::min(i + AHEAD, count - 1)] * itemsize, 1);
            std::memcpy(piece + changes.position[i] * itemsize, value, itemsize);
        }
    });
}

bool use_simd(const char* name) {
    if (!supports(std::strcmp(name, "avx512") ? name : "avx512_vpopcntdq")) return false;
    const Scan* scan = &portable_scan;
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx2")) scan = &avx2_scan;
    if (!std::strcmp(name, "avx512")) scan = &avx512_scan;
#endif
    chosen = scan;
    return true;
}

}  // namespace patches
}  // namespace sparsecomm
