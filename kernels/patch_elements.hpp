// Shared by the CPU and CUDA kernels of patches: sizes, classes, the order of values, and hashes.
#pragma once

#include "formats.hpp"

namespace sparsecomm {
namespace patches {

constexpr unsigned CLASSES = 16;
constexpr size_t PIECE = size_t(1) << 21;  // elements that are coded together
constexpr size_t BLOCK = 1024;             // bytes that are hashed together; pieces contain whole blocks

// Returns the class of an element: exponents up to `low` are of class 0, and each larger one of the next class. The exponent is
// (bits >> shift) & mask; with mask 0, all elements are of class 0.
template <class U>
SPARSECOMM_ANYWHERE uint32_t class_of(U bits, uint32_t shift, uint32_t mask, uint32_t low) {
    const uint32_t exponent = uint32_t(bits >> shift) & mask, above = exponent > low ? exponent - low : 0;
    return above < CLASSES ? above : CLASSES - 1;
}

// Maps the bits of a value to its place in the order of all values of its type, an unsigned integer; and back.
template <class U>
SPARSECOMM_ANYWHERE U ordered(U bits, bool is_float) {
    constexpr U SIGN = U(U(1) << (8 * sizeof(U) - 1));
    return !is_float ? bits : bits & SIGN ? U(~bits) : U(bits | SIGN);
}
template <class U>
SPARSECOMM_ANYWHERE U unordered(U place, bool is_float) {
    constexpr U SIGN = U(U(1) << (8 * sizeof(U) - 1));
    return !is_float ? place : place & SIGN ? U(place & ~SIGN) : U(~place);
}

// To hash a block, hash each 64-bit word with the key of its place, add up the hashes, and mix the sum with the block's number.
// Sums do not depend on the order, so threads and GPUs compute the same digest. It detects damage and other weights, but an
// attacker can make collisions.

// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15u;
SPARSECOMM_ANYWHERE constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
SPARSECOMM_ANYWHERE constexpr uint64_t key_of_place(uint64_t place) { return mix((place + 1) * GOLDEN); }

// Multiplies the halves of the word after adding its key (NH, Black et al., CRYPTO 1999), and adds the word with its halves
// exchanged, so that every bit counts even if one factor is 0.
SPARSECOMM_ANYWHERE uint64_t hash_with_key(uint64_t word, uint64_t key) {
    const uint64_t keyed = word ^ key;
    return (keyed & 0xffffffffu) * (keyed >> 32) + (word << 32 | word >> 32);
}

SPARSECOMM_ANYWHERE uint64_t mix_block(uint64_t hash, uint64_t block) { return mix(hash + (block + 1) * GOLDEN); }

}  // namespace patches
}  // namespace sparsecomm
