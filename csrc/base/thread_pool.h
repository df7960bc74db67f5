// A fixed set of threads that run one parallel region at a time.
//
// Owned by a backend; one caller at a time. Work items are claimed from a counter, so a core that is busy
// with something else slows the region down by its share only. Workers spin for a moment after a region
// (the next one of a decode step follows in microseconds), then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace lily {

class ThreadPool {
  public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(begin, end, thread) until [0, items) is covered in pieces of at most `grain` items.
    // `thread` is below threads() and unique among concurrent calls: an index for scratch memory.
    template <typename Body>
    void run(int64_t items, int64_t grain, Body&& body) {
        if (items <= 0) return;
        if (workers_.empty() || items <= grain) {
            for (int64_t begin = 0; begin < items; begin += grain) {
                body(begin, begin + grain < items ? begin + grain : items, 0);
            }
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        region_ = {[](void* context, int64_t begin, int64_t end, int thread) {
                       (*static_cast<Plain*>(context))(begin, end, thread);
                   },
                   const_cast<void*>(static_cast<const void*>(&body)), items, grain};
        dispatch();
    }

  private:
    struct Region {
        void (*call)(void*, int64_t, int64_t, int) = nullptr;
        void* context = nullptr;
        int64_t items = 0;
        int64_t grain = 1;
    };

    void dispatch();
    void work(int thread);
    void drain(int thread);

    std::vector<std::thread> workers_;
    Region region_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace lily
