#include "pool.hpp"

#include "float_mode.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsecomm {

namespace {

struct Job {
    const std::function<void(size_t)>* work;
    size_t parts;
    std::atomic<size_t> next{0};

    void run() {
        for (size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) (*work)(part);
    }
};

class Pool {
  public:
    std::mutex in_use;  // locked by the caller whose job the helpers run

    void run(Job& job, size_t helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (threads_.size() < helpers) threads_.emplace_back([this, id = threads_.size()] { serve(id); });
            job_ = &job;
            invited_ = helpers;
            busy_ = helpers;
            generation_++;
        }
        wake_.notify_all();
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        job_ = nullptr;
    }

  private:
    void serve(size_t id) {
        const DefaultFloatMode mode;  // a thread inherits the mode of its creator
        size_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (id >= invited_) continue;
            Job* job = job_;
            lock.unlock();
            job->run();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    Job* job_ = nullptr;
    size_t invited_ = 0, busy_ = 0, generation_ = 0;
};

// Never destroyed, because helpers wait in it until the process ends. A forked child has no helpers and starts new ones.
std::atomic<Pool*> current{nullptr};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

Pool& pool() {
    Pool* found = current.load();
    if (found) return *found;
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

}  // namespace

void run_parts(size_t parts, int threads, const std::function<void(size_t)>& work) {
    Job job{&work, parts};
    const size_t helpers = std::min(parts, size_t(std::max(threads, 1))) - 1;
    if (parts > 1 && helpers > 0) {
        Pool& shared = pool();
        std::unique_lock<std::mutex> lock(shared.in_use, std::try_to_lock);
        if (lock) {
            shared.run(job, helpers);
            return;
        }
    }
    job.run();
}

}  // namespace sparsecomm
