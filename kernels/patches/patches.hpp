// The codec of patches: finds, codes and applies the changed elements of a tensor. The old elements are the context.
//
// Every element belongs to a class, by the exponent of its old value. A change is its rank among the elements of its class, and
// the distance to the new value in the order of all values. Ranks are coded as gaps. Both sides know the old elements, so
// neither classes nor positions are sent. kernels/patches/README.md describes the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../patch_elements.hpp"

namespace sparsecomm {
namespace patches {

// How to read the elements of a dtype. The exponent is (bits >> shift) & mask; with mask 0, all elements are of class 0.
struct Elements {
    uint32_t itemsize;  // 1, 2, 4 or 8
    uint32_t shift, mask;
    uint32_t low;      // exponents up to this one are of class 0, and each larger one of the next class, up to CLASSES - 1
    bool is_float;     // sign and magnitude, rather than two's complement

    unsigned classes() const {
        const uint32_t above = mask > low ? mask - low : 0;
        return above < CLASSES ? above + 1 : CLASSES;
    }
};

// The changes of a piece, by class, and by rank within a class.
struct Changes {
    uint32_t members[CLASSES];  // elements of a class
    uint32_t count[CLASSES];    // how many of them have changed
    std::vector<uint32_t> rank;
    std::vector<uint64_t> distance;  // modulo 2^64, sign-extended from the width of an element; never 0
};

// Sums of hashes of blocks; the sums of pieces add up to those of a tensor.
struct Sums {
    uint64_t before = 0, after = 0;
};

// Returns the digest of a tensor of `bytes` bytes from the sum of its blocks' hashes.
uint64_t digest_of(uint64_t sum, size_t bytes);

// Returns the sum of the hashes of a tensor's blocks. Reads the tensor once.
uint64_t sum_of_blocks(const void* data, size_t bytes, int threads);

// Codes the changes of a piece. Appends the bytes to `out`; none if nothing has changed.
void encode(const Changes& changes, std::vector<uint8_t>& out);

// Decodes what `encode` has appended, for a piece of `size` elements. Sets `members` of classes whose unchanged elements were
// coded, and 0 for the others. Returns false if `encode` cannot have made the bytes; `changes` is then meaningless.
bool decode(const uint8_t* data, size_t bytes, size_t size, Changes& changes);

// Puts coded pieces together: the number of bytes of each, as uint32_t, then the bytes. Nothing if no piece has any.
std::vector<uint8_t> join(const std::vector<std::vector<uint8_t>>& pieces);

// Finds and codes all changes of a tensor of n elements. Returns joined pieces. Reads both versions once.
//
//   sums     [out]  of both versions
//   changed  [out]  number of changes
std::vector<uint8_t> diff(const void* before, const void* after, size_t n, Elements elements, int threads, Sums* sums,
                          size_t* changed);

// Codes the changes of pieces that a device has compared. Appends the bytes of each piece to `coded`.
//
//   members                [in]  elements of each class in each piece
//   starts                 [in]  the first change of each piece, and the end of the last
//   label, rank, distance  [in]  of each change from starts[0] on, by position
void encode(const uint32_t* members, const uint64_t* starts, size_t pieces, const uint8_t* label, const uint32_t* rank,
            const uint64_t* distance, int threads, std::vector<std::vector<uint8_t>>* coded);

// Decodes some joined pieces of a tensor of n elements: `pieces` pieces from piece `first` on. Returns false if the bytes are
// damaged.
bool decode(const uint8_t* coded, size_t bytes, size_t n, size_t first, size_t pieces, int threads,
            std::vector<Changes>* changes);

// The changes of a piece by position within it, with new elements.
struct Located {
    std::vector<uint32_t> position;
    std::vector<uint8_t> value;  // `itemsize` bytes each
};

// Decodes joined pieces, and finds the changed elements. Reads the tensor once; writes nothing to it. Returns false if the bytes
// do not fit the elements.
//
//   coded    [in]   `bytes` arbitrary bytes
//   sums     [out]  of both versions
//   located  [out]  of each piece
bool locate(const void* before, size_t n, Elements elements, const uint8_t* coded, size_t bytes, int threads, Sums* sums,
            std::vector<Located>* located);

// Writes new elements.
void write(void* data, Elements elements, const std::vector<Located>& located, int threads);

// Uses an instruction set (portable, avx2, avx512) from now on. Returns false if the processor does not support it.
bool use_simd(const char* name);

// The loops over elements of one instruction set, for elements of 1, 2, 4 and 8 bytes.
struct Scan {
    struct Found {  // changes by position
        std::vector<uint8_t> label;  // their classes
        std::vector<uint32_t> rank;
        std::vector<uint64_t> distance;
        size_t count;
    };
    const char* name;
    uint64_t (*sum)(const uint8_t* data, size_t bytes, size_t first_block);
    void (*compare[4])(const void* before, const void* after, size_t n, Elements elements, size_t first_block, Sums* sums,
                       uint32_t* members, Found* found);
    bool (*locate[4])(const void* before, size_t n, Elements elements, size_t first_block, const Changes& changes, Sums* sums,
                      Located* located);
};
extern const Scan portable_scan;
#if defined(__x86_64__)
extern const Scan avx2_scan, avx512_scan;
#endif

}  // namespace patches
}  // namespace sparsecomm
