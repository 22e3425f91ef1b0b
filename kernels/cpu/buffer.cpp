#include "buffer.hpp"

#include <cstdint>
#include <new>

#include <sys/mman.h>

namespace sparsecomm {

Scratch::~Scratch() { shrink(0); }

void Scratch::shrink(size_t bytes) noexcept {
    while (bytes_ > bytes) {
        const Block block = kept_[--count_];
        bytes_ -= block.bytes;
        munmap(block.memory, block.bytes);
    }
}

void Scratch::release(size_t keep) noexcept {
    if (busy_.test_and_set(std::memory_order_acquire)) return;
    shrink(keep);
    busy_.clear(std::memory_order_release);
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
    if (bytes > SIZE_MAX - PAGE) throw std::bad_alloc();
    const size_t rounded = (bytes + PAGE) / PAGE * PAGE;
    void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
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
    munmap(memory, granted);
}

}  // namespace sparsecomm
