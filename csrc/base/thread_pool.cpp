#include "base/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lily {
namespace {

constexpr int kSpins = 4000;  // about 100 microseconds: longer than the serial part between two regions

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::dispatch() {
    next_.store(0, std::memory_order_relaxed);
    running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    drain(0);
    int spins = 0;
    for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) {
        if (++spins < kSpins) {
            pause_cpu();
        } else {
            running_.wait(left, std::memory_order_acquire);
        }
    }
}

void ThreadPool::drain(int thread) {
    const Region& region = region_;
    for (;;) {
        const int64_t begin = next_.fetch_add(region.grain, std::memory_order_relaxed);
        if (begin >= region.items) return;
        const int64_t end = begin + region.grain;
        region.call(region.context, begin, end < region.items ? end : region.items, thread);
    }
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        uint32_t now;
        while ((now = epoch_.load(std::memory_order_acquire)) == seen) {
            if (++spins < kSpins) {
                pause_cpu();
            } else {
                epoch_.wait(seen, std::memory_order_acquire);
            }
        }
        seen = now;
        if (stopping_.load()) return;
        drain(thread);
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
    }
}

}  // namespace lily
