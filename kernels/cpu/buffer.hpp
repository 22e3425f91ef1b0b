// Scratch memory that is used again by the next call: fresh pages cost more than the work done in them.
#pragma once

#include <cstddef>
#include <utility>

namespace sparsecomm {

void* take_scratch(size_t bytes, size_t* granted);  // throws std::bad_alloc
void give_scratch(void* memory, size_t granted);
void drop_scratch();  // return what is kept to the system

// Around a fork, by the thread that forks: in the child, too, the memory that is kept is then whole, and free to be taken.
void lock_scratch();
void unlock_scratch();

// An array of uninitialised T, for trivial types.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) { data_ = static_cast<T*>(take_scratch(count * sizeof(T), &granted_)); }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() {
        if (data_) give_scratch(data_, granted_);
    }
    T* get() const { return data_; }
    T& operator[](size_t i) const { return data_[i]; }

  private:
    void swap(Buffer& other) {
        std::swap(data_, other.data_);
        std::swap(granted_, other.granted_);
    }
    T* data_ = nullptr;
    size_t granted_ = 0;
};

}  // namespace sparsecomm
