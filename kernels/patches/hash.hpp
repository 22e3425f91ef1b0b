// The keys of the hash of a block (see ../patch_elements.hpp), computed once.
#pragma once

#include "patches.hpp"

namespace sparsecomm {
namespace patches {

struct Keys {
    alignas(64) uint64_t of[BLOCK / 8];
    constexpr Keys() : of() {
        for (size_t j = 0; j < BLOCK / 8; j++) of[j] = key_of_place(j);
    }
};
inline constexpr Keys KEYS;

inline uint64_t hash_word(uint64_t word, size_t place) { return hash_with_key(word, KEYS.of[place]); }

}  // namespace patches
}  // namespace sparsecomm
