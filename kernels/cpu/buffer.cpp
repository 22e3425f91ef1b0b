#include "buffer.hpp"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace sparsecomm {

namespace {

struct Block {
    void* memory;
    size_t bytes;
};

constexpr size_t KEEP_BLOCKS = 64;          // blocks kept between calls at most
constexpr size_t KEEP_BYTES = size_t(1) << 28;  // and bytes

std::mutex mutex;
std::vector<Block>& kept() {
    static auto* blocks = new std::vector<Block>;
    return *blocks;
}
size_t kept_bytes = 0;

}  // namespace

void* take_scratch(size_t bytes, size_t* granted) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto& blocks = kept();
        size_t best = blocks.size();
        for (size_t i = 0; i < blocks.size(); i++)
            if (blocks[i].bytes >= bytes && blocks[i].bytes / 4 <= bytes + 4096 &&
                (best == blocks.size() || blocks[i].bytes < blocks[best].bytes))
                best = i;
        if (best < blocks.size()) {
            const Block block = blocks[best];
            blocks[best] = blocks.back();
            blocks.pop_back();
            kept_bytes -= block.bytes;
            *granted = block.bytes;
            return block.memory;
        }
    }
    if (bytes > SIZE_MAX - 64) throw std::bad_alloc();
    const size_t rounded = (bytes + 127) / 64 * 64;
    void* memory = std::aligned_alloc(64, rounded);
    if (!memory) throw std::bad_alloc();
    *granted = rounded;
    return memory;
}

void give_scratch(void* memory, size_t granted) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto& blocks = kept();
        if (blocks.size() < KEEP_BLOCKS && kept_bytes + granted <= KEEP_BYTES) {
            try {
                blocks.push_back({memory, granted});
                kept_bytes += granted;
                return;
            } catch (const std::bad_alloc&) {
            }
        }
    }
    std::free(memory);
}

void drop_scratch() {
    std::lock_guard<std::mutex> lock(mutex);
    for (const Block& block : kept()) std::free(block.memory);
    kept().clear();
    kept_bytes = 0;
}

void lock_scratch() { mutex.lock(); }
void unlock_scratch() { mutex.unlock(); }

}  // namespace sparsecomm
