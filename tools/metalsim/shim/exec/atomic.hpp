// Atomics. Threads of the simulator never run at the same time, so plain reads and writes do; the checker
// is told about each access, since atomic accesses may race with each other but not with plain ones.
#pragma once
#include "barrier.hpp"
#include "scalar.hpp"

namespace msl::metal {
template <class T>
struct atomic {
    T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;

#define METALSIM_ATOMIC __attribute__((noinline, no_sanitize("thread")))
#define METALSIM_NOTE(kind) \
    metalsim::atomic_access(p, sizeof(T), metalsim::AtomicKind::kind, __builtin_return_address(0))
#define METALSIM_READ_MODIFY_WRITE(name, expression)                                       \
    template <class T>                                                                     \
    METALSIM_ATOMIC T name(volatile atomic<T>* p, std::common_type_t<T> x, memory_order) { \
        METALSIM_NOTE(read_modify_write);                                                  \
        T old = p->value;                                                                  \
        p->value = T(expression);                                                          \
        return old;                                                                        \
    }
METALSIM_READ_MODIFY_WRITE(atomic_fetch_add_explicit, old + x)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_sub_explicit, old - x)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_or_explicit, old | x)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_and_explicit, old& x)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_xor_explicit, old ^ x)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_max_explicit, old < x ? x : old)
METALSIM_READ_MODIFY_WRITE(atomic_fetch_min_explicit, x < old ? x : old)
METALSIM_READ_MODIFY_WRITE(atomic_exchange_explicit, x)

template <class T>
METALSIM_ATOMIC T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
    METALSIM_NOTE(load);
    return p->value;
}
template <class T>
METALSIM_ATOMIC void atomic_store_explicit(volatile atomic<T>* p, std::common_type_t<T> x, memory_order) {
    METALSIM_NOTE(store);
    p->value = x;
}
template <class T>
METALSIM_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected,
                                                           std::common_type_t<T> desired, memory_order,
                                                           memory_order) {
    METALSIM_NOTE(read_modify_write);
    // Bit comparison: a float NaN compares equal to itself, as in hardware.
    T old = p->value;
    if (memcmp((const void*)&old, expected, sizeof(T)) == 0) {
        p->value = desired;
        return true;
    }
    *expected = old;
    return false;
}

// For last-block counters. Placed directly behind the read-modify-write of `counter`: from here on, what
// the threadgroups that passed their own read-modify-write had ordered before it is ordered before this
// thread.
template <class T>
void metalsim_ordered_counter(const volatile atomic<T>* counter) {
    metalsim::ordered_counter(counter);
}
}  // namespace msl::metal
