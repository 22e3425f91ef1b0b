// Threads for the parts of one call, from a pool that starts on first use and supports fork.
#pragma once

#include <cstddef>
#include <functional>

namespace sparsecomm {

// Calls work(part) for every part in [0, parts), on the caller and at most threads - 1 helpers. `work` must not throw.
// Thread-safe; only one caller at a time uses the helpers.
void run_parts(size_t parts, int threads, const std::function<void(size_t)>& work);

template <class Work>
void parallel(size_t parts, int threads, const Work& work) {
    if (parts == 1)
        work(size_t(0));
    else
        run_parts(parts, threads, std::cref(work));
}

// Returns the number of parts, of at least `grain` elements each, for n elements on `threads` threads.
inline size_t parts_for(size_t n, size_t grain, int threads) {
    const size_t max_parts = n / grain;
    const size_t wanted = threads > 1 ? size_t(threads) : 1;
    return max_parts < 1 ? 1 : (max_parts < wanted ? max_parts : wanted);
}

}  // namespace sparsecomm
