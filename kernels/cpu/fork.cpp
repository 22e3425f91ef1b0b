// What kernels need when the process forks. A child has one thread, the one that forked, and all memory as it stood: also
// that of a mutex which another thread held, and that of threads which it does not have.
#include <pthread.h>

#include "buffer.hpp"
#include "pool.hpp"

namespace sparsecomm {

namespace {

void in_child() {
    unlock_scratch();
    forget_pool();
}

// When the library is loaded, before any thread could be in it.
[[maybe_unused]] const int registered = pthread_atfork(lock_scratch, unlock_scratch, in_child);

}  // namespace

}  // namespace sparsecomm
