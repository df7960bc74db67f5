#include "base/thread_pool.h"

#include <algorithm>

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

ThreadPool::ThreadPool(int threads, bool spin) : spins_(spin ? kSpins : 0) {
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
        if (++spins < spins_) {
            pause_cpu();
        } else {
            running_.wait(left, std::memory_order_acquire);
        }
    }
}

// A quarter of a thread's equal share of what is left, in whole units: a thread on a busy core holds two
// pieces and must not end last for it.
ThreadPool::Claim ThreadPool::claim() {
    int64_t begin = next_.load(std::memory_order_relaxed);
    for (;;) {
        const int64_t left = region_.items - begin;
        if (left <= 0) return {region_.items, region_.items};
        const int64_t units = std::max<int64_t>(1, left / (4 * threads() * region_.unit));
        const int64_t end = std::min(begin + units * region_.unit, region_.items);
        if (next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) return {begin, end};
    }
}

void ThreadPool::drain(int thread) {
    for (Claim now = claim(); now.begin < region_.items;) {
        const Claim after = claim();
        region_.call(region_.context, {now.begin, now.end, after.begin, thread});
        now = after;
    }
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        uint32_t now;
        while ((now = epoch_.load(std::memory_order_acquire)) == seen) {
            if (++spins < spins_) {
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
