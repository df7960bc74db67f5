// Barriers and fences.
#pragma once
#include "kernel_abi.hpp"

namespace msl::metal {
enum class mem_flags : unsigned {
    mem_none = 0,
    mem_device = 1,
    mem_threadgroup = 2,
    mem_texture = 4,
    mem_threadgroup_imageblock = 8
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) & unsigned(b)); }

enum memory_order {
    memory_order_relaxed,
    memory_order_acquire,
    memory_order_release,
    memory_order_acq_rel,
    memory_order_seq_cst
};
enum thread_scope {
    thread_scope_thread,
    thread_scope_simdgroup,
    thread_scope_threadgroup,
    thread_scope_device
};

// Default arguments are evaluated where the function is called, which gives each call its own site.
#define METALSIM_SITE \
    const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE(), int column_ = __builtin_COLUMN()
#define METALSIM_HERE(operation) \
    ::metalsim::Site { file_, line_, column_, (const void*)(operation) }

inline void threadgroup_barrier(mem_flags flags, METALSIM_SITE) {
    metalsim::threadgroup_barrier_wait(unsigned(flags), METALSIM_HERE(1));
}
inline void simdgroup_barrier(mem_flags flags, METALSIM_SITE) {
    metalsim::simdgroup_barrier_wait(unsigned(flags), METALSIM_HERE(2));
}
inline void atomic_thread_fence(mem_flags flags, memory_order, thread_scope scope = thread_scope_device) {
    if (scope == thread_scope_device) metalsim::thread_fence(unsigned(flags));
}
}  // namespace msl::metal
