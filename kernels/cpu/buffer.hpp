// Scratch memory that the next call reuses, because fresh pages take longer than the work on them.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

namespace sparsecomm {

// The scratch memory of one owner, such as a call queue. Owners share nothing. Any thread may take and give back memory; if
// another thread is doing so, it uses the system's allocator instead. So no thread waits, not even a forked child for a
// thread that no longer exists.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch();

    void* take(size_t bytes, size_t* granted);  // throws std::bad_alloc
    void give(void* memory, size_t granted) noexcept;
    void release(size_t keep) noexcept;  // unmap memory that is not in use, except for `keep` bytes

  private:
    struct Block {
        void* memory;
        size_t bytes;
    };
    static constexpr size_t KEEP_BLOCKS = 64;              // maximum kept between calls
    static constexpr size_t KEEP_BYTES = size_t(1) << 28;  // maximum bytes kept
    static constexpr size_t PAGE = 4096;

    void shrink(size_t bytes) noexcept;

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    Block kept_[KEEP_BLOCKS];
    size_t count_ = 0, bytes_ = 0;
};

// An uninitialized array of a trivial type.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(Scratch& scratch, size_t count) : scratch_(&scratch) {
        data_ = static_cast<T*>(scratch.take(count * sizeof(T), &granted_));
    }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() {
        if (data_) scratch_->give(data_, granted_);
    }
    T* get() const { return data_; }
    T& operator[](size_t i) const { return data_[i]; }

  private:
    void swap(Buffer& other) {
        std::swap(scratch_, other.scratch_);
        std::swap(data_, other.data_);
        std::swap(granted_, other.granted_);
    }
    Scratch* scratch_ = nullptr;
    T* data_ = nullptr;
    size_t granted_ = 0;
};

}  // namespace sparsecomm
