// Memory that is asked for while something else is read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::cpu {
namespace LILY_ISA {

// Asks for a cache line. Written out on x86: GCC drops calls to functions that do nothing but prefetch.
inline void prefetch(const std::byte* p) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*p));
#else
    __builtin_prefetch(p, 0, 3);
#endif
}

// `bytes` bytes in `steps` equal steps; by default none.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const std::byte* begin, int64_t bytes, int64_t steps)
        : next_(begin), reached_(begin), end_(begin + bytes), step_((bytes + steps - 1) / steps) {}
    void step() {
        if (next_ >= end_) return;
        reached_ += step_;
        for (; next_ < reached_ && next_ < end_; next_ += 64) prefetch(next_);
    }

  private:
    const std::byte* next_ = nullptr;
    const std::byte* reached_ = nullptr;
    const std::byte* end_ = nullptr;
    int64_t step_ = 0;
};

}  // namespace LILY_ISA
}  // namespace lily::cpu
