// A mutex that serves callers in the order they came.
//
// Under std::mutex, a thread that unlocks and locks again at once, as a long prompt does between chunks,
// keeps the others waiting for as long as it likes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace lily {

class FairMutex {
  public:
    void lock() {
        std::unique_lock guard(mutex_);
        const uint64_t ticket = next_++;
        turn_.wait(guard, [&] { return ticket == serving_; });
    }

    void unlock() {
        {
            const std::lock_guard guard(mutex_);
            ++serving_;
        }
        turn_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable turn_;
    uint64_t next_ = 0;
    uint64_t serving_ = 0;
};

}  // namespace lily
