// A fixed set of threads that run one parallel region at a time.
//
// Owned by a backend; one caller at a time. Work items are claimed from a counter, so a core that is busy
// with something else slows the region down by its share only: large pieces first, then ever smaller ones, so
// that reads stay long and all threads end together. A thread claims its next piece before it begins one,
// which tells the piece what to fetch ahead. Workers spin for a moment after a region (the next one of a
// decode step follows in microseconds), then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace lily {

// Items [begin, end); the same thread goes on with `next` (the number of items if with none).
struct Piece {
    int64_t begin;
    int64_t end;
    int64_t next;
    int thread;  // below threads() and unique among concurrent calls: an index for scratch memory
};

class ThreadPool {
  public:
    // `spin`: wait a moment for the next region before sleeping.
    explicit ThreadPool(int threads, bool spin = true);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(piece) until [0, items) is covered. Pieces begin at multiples of `unit`.
    template <typename Body>
    void run(int64_t items, int64_t unit, Body&& body) {
        if (items <= 0) return;
        if (workers_.empty() || items <= unit) return body(Piece{0, items, items, 0});
        using Plain = std::remove_reference_t<Body>;
        region_ = {[](void* context, const Piece& piece) { (*static_cast<Plain*>(context))(piece); },
                   const_cast<void*>(static_cast<const void*>(&body)), items, unit};
        dispatch();
    }

  private:
    struct Region {
        void (*call)(void*, const Piece&) = nullptr;
        void* context = nullptr;
        int64_t items = 0;
        int64_t unit = 1;
    };
    struct Claim {
        int64_t begin;
        int64_t end;
    };

    void dispatch();
    void work(int thread);
    void drain(int thread);
    Claim claim();

    int spins_;
    std::vector<std::thread> workers_;
    Region region_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace lily
