#include "buffer.hpp"

#include <cstdint>
#include <cstdlib>
#include <new>

namespace sparsecomm {

Scratch::~Scratch() {
    for (size_t i = 0; i < count_; i++) std::free(kept_[i].memory);
}

void* Scratch::take(size_t bytes, size_t* granted) {
    if (!busy_.test_and_set(std::memory_order_acquire)) {
        size_t best = count_;
        for (size_t i = 0; i < count_; i++)
            if (kept_[i].bytes >= bytes && kept_[i].bytes / 4 <= bytes + 4096 &&
                (best == count_ || kept_[i].bytes < kept_[best].bytes))
                best = i;
        const bool found = best < count_;
        const Block block = found ? kept_[best] : Block{nullptr, 0};
        if (found) {
            kept_[best] = kept_[--count_];
            bytes_ -= block.bytes;
        }
        busy_.clear(std::memory_order_release);
        if (found) {
            *granted = block.bytes;
            return block.memory;
        }
    }
    if (bytes > SIZE_MAX - 128) throw std::bad_alloc();
    const size_t rounded = (bytes + 127) / 64 * 64;
    void* memory = std::aligned_alloc(64, rounded);
    if (!memory) throw std::bad_alloc();
    *granted = rounded;
    return memory;
}

void Scratch::give(void* memory, size_t granted) noexcept {
    if (!busy_.test_and_set(std::memory_order_acquire)) {
        const bool keep = count_ < KEEP_BLOCKS && bytes_ + granted <= KEEP_BYTES;
        if (keep) {
            kept_[count_++] = {memory, granted};
            bytes_ += granted;
        }
        busy_.clear(std::memory_order_release);
        if (keep) return;
    }
    std::free(memory);
}

}  // namespace sparsecomm
