// The pool and the scratch memory of the kernels, used by several threads at once, and by children that were forked
// meanwhile. Built with ThreadSanitizer by test_sanitizers.py. The arguments: threads, calls of each, forks, seed.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "buffer.hpp"
#include "kernels.hpp"
#include "pool.hpp"

using namespace sparsecomm;

namespace {

std::atomic<size_t> failures{0};

void expect(bool good, const char* what) {
    if (good) return;
    failures++;
    std::printf("WRONG: %s\n", what);
}

// Every part of a call is done once, whoever does it.
void run_parts(std::mt19937_64& random) {
    const size_t parts = 1 + random() % 9;
    std::vector<int> done(parts, 0);
    parallel(parts, int(1 + random() % 4), [&](size_t part) { done[part]++; });
    expect(std::count(done.begin(), done.end(), 1) == std::ptrdiff_t(parts), "a part was done twice, or not at all");
}

// Scratch memory belongs to one call at a time.
Scratch memory;
void scratch(std::mt19937_64& random) {
    const uint64_t mine = random();
    std::vector<Buffer<uint64_t>> blocks;
    std::vector<size_t> counts;
    for (size_t i = 0; i < 4; i++) {
        counts.push_back(1 + random() % (random() % 10 ? 50 : 5000));
        blocks.emplace_back(memory, counts[i]);
        std::fill_n(blocks[i].get(), counts[i], mine + i);
    }
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < counts[i]; j++) expect(blocks[i][j] == mine + i, "scratch memory has two owners");
}

// A selection large enough to be shared by threads.
void select(std::mt19937_64& random) {
    const size_t n = 300000, k = 100;
    std::vector<float> x(n, 0.5f), residual(n, 0.25f);
    const size_t at = random() % (n - k);
    std::fill_n(x.begin() + long(at), k, 3.0f);
    std::vector<int32_t> index(k);
    std::vector<float> value(k);
    Dense r{residual.data(), Type::f32, n};
    const size_t found = topk({x.data(), Type::f32, n}, &r, k, false, index.data(), value.data(), 3, memory);
    expect(found == k && size_t(index[0]) == at && value[k - 1] == 3.25f && residual[at] == 0, "a selection");
}

void work(uint64_t seed, int calls) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < calls; i++) {
        run_parts(random);
        for (int j = 0; j < 10; j++) scratch(random);
        if (i % 20 == 0) select(random);
    }
}

// A child has the memory of this moment, and none of the other threads.
void fork_and_work(uint64_t seed) {
    std::fflush(stdout);  // or children say it, too
    const pid_t child = fork();
    if (child == 0) {
        failures = 0;
        alarm(20);  // a lock that nobody holds any more would be waited for without end
        work(seed, 5);
        std::fflush(stdout);
        _exit(failures ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child hangs or fails");
}

}  // namespace

int main(int, char** arguments) {
    const int count = std::atoi(arguments[1]), calls = std::atoi(arguments[2]), forks = std::atoi(arguments[3]);
    const uint64_t seed = std::strtoull(arguments[4], nullptr, 10);
    std::vector<std::thread> threads;
    for (int t = 0; t < count; t++) threads.emplace_back([=] { work(seed + uint64_t(t), calls); });
    for (int i = 0; i < forks && !failures; i++) fork_and_work(seed + 1000 + uint64_t(i));
    for (auto& thread : threads) thread.join();
    std::printf("%d threads, %d calls of each, %d forks, %zu failures\n", count, calls, forks, failures.load());
    return failures ? 1 : 0;
}
