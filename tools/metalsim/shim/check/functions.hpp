// Check build: math, simdgroup, quadgroup, barrier and atomic functions. bfloat has none of them in Metal's
// library (arithmetic on it gives float), nor has it or a 64-bit integer simdgroup functions.
#pragma once
#include "types.hpp"

namespace metal {
namespace detail {
template <typename T>
struct element {
    using type = T;
};
template <typename T, int N>
struct element<vec<T, N>> {
    using type = T;
};
template <typename T>
using element_t = typename element<T>::type;
template <typename T>
constant constexpr bool is_math_v = !is_same_v<element_t<T>, bfloat> && !is_same_v<element_t<T>, bool>;
template <typename T>
constant constexpr bool is_group_v = is_math_v<T> && sizeof(element_t<T>) <= 4;
template <typename T>
using math_t = enable_if_t<is_math_v<T>, T>;
template <typename T>
using group_t = enable_if_t<is_group_v<T>, T>;
}  // namespace detail

#define METALSIM_1(name)    \
    template <typename T>   \
    detail::math_t<T> name(T x);
#define METALSIM_2(name)    \
    template <typename T>   \
    detail::math_t<T> name(T x, T y);
#define METALSIM_3(name)    \
    template <typename T>   \
    detail::math_t<T> name(T x, T y, T z);
#define METALSIM_MATH                                                                                       \
    METALSIM_1(exp) METALSIM_1(exp2) METALSIM_1(exp10) METALSIM_1(log) METALSIM_1(log2) METALSIM_1(log10)   \
    METALSIM_1(sqrt) METALSIM_1(rsqrt) METALSIM_1(sin) METALSIM_1(cos) METALSIM_1(tan) METALSIM_1(asin)     \
    METALSIM_1(acos) METALSIM_1(atan) METALSIM_1(sinh) METALSIM_1(cosh) METALSIM_1(tanh) METALSIM_1(asinh)  \
    METALSIM_1(acosh) METALSIM_1(atanh) METALSIM_1(floor) METALSIM_1(ceil) METALSIM_1(rint)                 \
    METALSIM_1(round) METALSIM_1(trunc) METALSIM_1(fabs) METALSIM_1(fract) METALSIM_1(sign) METALSIM_2(pow) \
    METALSIM_2(powr) METALSIM_2(fmod) METALSIM_2(atan2) METALSIM_2(fmin) METALSIM_2(fmax)                   \
    METALSIM_2(copysign) METALSIM_2(divide)                                                                 \
    template <typename T>                                                                                   \
    detail::math_t<T> ldexp(T x, int e);
METALSIM_MATH
namespace precise {
METALSIM_MATH
}
namespace fast {
METALSIM_MATH
}
METALSIM_1(abs)
METALSIM_1(popcount)
METALSIM_1(clz)
METALSIM_1(ctz)
METALSIM_1(reverse_bits)
METALSIM_2(min)
METALSIM_2(max)
METALSIM_2(step)
METALSIM_2(mulhi)
METALSIM_2(rotate)
METALSIM_2(absdiff)
METALSIM_3(clamp)
METALSIM_3(fma)
METALSIM_3(mix)
METALSIM_3(mad)
template <typename T>
T select(T a, T b, bool c);
template <typename T, typename C, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c);
template <typename T, int N>
T dot(vec<T, N> a, vec<T, N> b);
template <typename T, int N>
T length(vec<T, N> a);
template <typename T, int N>
T length_squared(vec<T, N> a);
template <typename T, int N>
bool all(vec<T, N> v);
template <typename T, int N>
bool any(vec<T, N> v);
template <typename T>
bool isnan(T x);
template <typename T>
bool isinf(T x);
template <typename T>
bool isfinite(T x);
template <typename T>
bool signbit(T x);
template <typename T>
T extract_bits(T v, uint offset, uint bits);
template <typename T>
T insert_bits(T base, T insert, uint offset, uint bits);
template <typename T>
T sincos(T x, thread T& cosine);
template <typename T>
T modf(T x, thread T& integral);
template <typename T>
T frexp(T x, thread int& exponent);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
mem_flags operator|(mem_flags a, mem_flags b);
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define METALSIM_GROUP_1(name) \
    template <typename T>      \
    detail::group_t<T> name(T value);
#define METALSIM_GROUP_MOVE(name) \
    template <typename T>         \
    detail::group_t<T> name(T value, ushort by);
#define METALSIM_GROUP(group)                           \
    METALSIM_GROUP_1(group##_sum)                       \
    METALSIM_GROUP_1(group##_product)                   \
    METALSIM_GROUP_1(group##_max)                       \
    METALSIM_GROUP_1(group##_min)                       \
    METALSIM_GROUP_1(group##_and)                       \
    METALSIM_GROUP_1(group##_or)                        \
    METALSIM_GROUP_1(group##_xor)                       \
    METALSIM_GROUP_1(group##_prefix_inclusive_sum)      \
    METALSIM_GROUP_1(group##_prefix_exclusive_sum)      \
    METALSIM_GROUP_1(group##_prefix_inclusive_product)  \
    METALSIM_GROUP_1(group##_prefix_exclusive_product)  \
    METALSIM_GROUP_1(group##_broadcast_first)           \
    METALSIM_GROUP_MOVE(group##_shuffle)                \
    METALSIM_GROUP_MOVE(group##_broadcast)              \
    METALSIM_GROUP_MOVE(group##_shuffle_xor)            \
    METALSIM_GROUP_MOVE(group##_shuffle_up)             \
    METALSIM_GROUP_MOVE(group##_shuffle_down)           \
    METALSIM_GROUP_MOVE(group##_shuffle_rotate_up)      \
    METALSIM_GROUP_MOVE(group##_shuffle_rotate_down)    \
    struct group##_vote {                               \
        using vote_t = ulong;                           \
        explicit group##_vote(vote_t v = 0);            \
        explicit operator vote_t() const;               \
        bool any() const;                               \
        bool all() const;                               \
    };                                                  \
    group##_vote group##_ballot(bool p);                \
    group##_vote group##_active_threads_mask();         \
    bool group##_all(bool p);                           \
    bool group##_any(bool p);                           \
    bool group##_is_first();
METALSIM_GROUP(simd)
METALSIM_GROUP(quad)
template <typename T>
detail::group_t<T> simd_shuffle_and_fill_up(T value, T fill, ushort delta);
template <typename T>
detail::group_t<T> simd_shuffle_and_fill_down(T value, T fill, ushort delta);

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
#if __METAL_VERSION__ >= 320
void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device);
#endif
template <typename T>
struct atomic {
    T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;
namespace detail {
template <typename T>
struct identity {
    using type = T;
};
template <typename T>
using identity_t = typename identity<T>::type;
}  // namespace detail
// Atomics exist in device and in threadgroup memory only.
#define METALSIM_ATOMIC_OPERATION(space, name) \
    template <typename T>                      \
    T atomic_##name##_explicit(volatile space atomic<T>* p, detail::identity_t<T> v, memory_order o);
#define METALSIM_ATOMICS(space)                                                                               \
    template <typename T>                                                                                     \
    T atomic_load_explicit(const volatile space atomic<T>* p, memory_order o);                                \
    template <typename T>                                                                                     \
    void atomic_store_explicit(volatile space atomic<T>* p, detail::identity_t<T> v, memory_order o);         \
    template <typename T>                                                                                     \
    bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, thread T* expected,               \
                                               detail::identity_t<T> v, memory_order a, memory_order b);      \
    METALSIM_ATOMIC_OPERATION(space, exchange)                                                                \
    METALSIM_ATOMIC_OPERATION(space, fetch_add)                                                               \
    METALSIM_ATOMIC_OPERATION(space, fetch_sub)                                                               \
    METALSIM_ATOMIC_OPERATION(space, fetch_or)                                                                \
    METALSIM_ATOMIC_OPERATION(space, fetch_and)                                                               \
    METALSIM_ATOMIC_OPERATION(space, fetch_xor)                                                               \
    METALSIM_ATOMIC_OPERATION(space, fetch_min)                                                               \
    METALSIM_ATOMIC_OPERATION(space, fetch_max)
METALSIM_ATOMICS(device)
METALSIM_ATOMICS(threadgroup)
template <typename T>
void metalsim_ordered_counter(const volatile device atomic<T>* counter);

template <typename T, int R = 8, int C = 8>
struct simdgroup_matrix {
    simdgroup_matrix();
    explicit simdgroup_matrix(T diagonal);
    thread vec<T, 2>& thread_elements();
    T elements[2];
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <typename T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v);
#define METALSIM_MATRIX_MEMORY(space)                                                                     \
    template <typename T, int R, int C>                                                                   \
    void simdgroup_load(thread simdgroup_matrix<T, R, C>& m, const space T* p, ulong elements_per_row = C, \
                        ulong2 origin = (ulong2)0, bool transpose = false);                               \
    template <typename T, int R, int C>                                                                   \
    void simdgroup_store(simdgroup_matrix<T, R, C> m, space T* p, ulong elements_per_row = C,             \
                         ulong2 origin = (ulong2)0, bool transpose = false);
METALSIM_MATRIX_MEMORY(device)
METALSIM_MATRIX_MEMORY(threadgroup)
template <typename D, typename A, typename B, typename E, int R, int K, int C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, K> a,
                                   simdgroup_matrix<B, K, C> b, simdgroup_matrix<E, R, C> c);
template <typename D, typename A, typename B, int R, int K, int C>
void simdgroup_multiply(thread simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, K> a, simdgroup_matrix<B, K, C> b);
}  // namespace metal
