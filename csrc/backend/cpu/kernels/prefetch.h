// Asking for memory before it is read.
#pragma once

#include <cstddef>

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

}  // namespace LILY_ISA
}  // namespace lily::cpu
