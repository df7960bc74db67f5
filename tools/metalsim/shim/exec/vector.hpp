// Vectors of 2, 3 and 4 components with Metal's size, alignment, constructors, operators and swizzles.
// clang's own vector extension is not used: in C++ it turns float4(int4_value) into a bit cast.
#pragma once
#include "kernel_abi.hpp"
#include "metalsim_swizzles.inc"
#include "scalar.hpp"

namespace msl::metal {

#ifdef METALSIM_CHECKED
// Copying a vector verifies its alignment, as a GPU vector load needs it. The empty asm hides the address
// from the optimiser, which takes references to be aligned.
__attribute__((noinline)) inline void check_alignment(const void* p, unsigned alignment) {
    uintptr_t address = (uintptr_t)p;
    asm("" : "+r"(address));
    if (address & (alignment - 1)) metalsim::misaligned_vector(p, alignment, __builtin_return_address(0));
}
#define METALSIM_COPY(...)                                 \
    vec(const vec& o) {                                    \
        ::msl::metal::check_alignment(&o, alignof(vec));   \
        __VA_ARGS__                                        \
    }                                                      \
    vec& operator=(const vec& o) {                         \
        ::msl::metal::check_alignment(this, alignof(vec)); \
        __VA_ARGS__                                        \
        return *this;                                      \
    }
#else
#define METALSIM_COPY(...)
#endif

#define METALSIM_SUBSCRIPT                   \
    T& operator[](int i) { return (&x)[i]; } \
    const T& operator[](int i) const { return (&x)[i]; }

template <class S>
using if_arithmetic = std::enable_if_t<is_arithmetic_v<S>>;

template <class T, int N>
struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    vec() = default;
    METALSIM_COPY(x = o.x; y = o.y;)
    template <class S, class = if_arithmetic<S>>
    constexpr vec(S s) : x(T(s)), y(T(s)) {}
    template <class A, class B, class = if_arithmetic<A>, class = if_arithmetic<B>>
    constexpr vec(A a, B b) : x(T(a)), y(T(b)) {}
    template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
    explicit vec(const vec<U, 2>& o) : x(T(o.x)), y(T(o.y)) {}
    METALSIM_SUBSCRIPT
    METALSIM_SWIZZLES_2
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    T x, y, z;
    vec() = default;
    METALSIM_COPY(x = o.x; y = o.y; z = o.z;)
    template <class S, class = if_arithmetic<S>>
    constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)) {}
    template <class A, class B, class C, class = if_arithmetic<A>, class = if_arithmetic<B>,
              class = if_arithmetic<C>>
    constexpr vec(A a, B b, C c) : x(T(a)), y(T(b)), z(T(c)) {}
    vec(vec<T, 2> a, T c) : x(a.x), y(a.y), z(c) {}
    vec(T a, vec<T, 2> b) : x(a), y(b.x), z(b.y) {}
    template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
    explicit vec(const vec<U, 3>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)) {}
    METALSIM_SUBSCRIPT
    METALSIM_SWIZZLES_3
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    vec() = default;
    METALSIM_COPY(x = o.x; y = o.y; z = o.z; w = o.w;)
    template <class S, class = if_arithmetic<S>>
    constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)), w(T(s)) {}
    template <class A, class B, class C, class D, class = if_arithmetic<A>, class = if_arithmetic<B>,
              class = if_arithmetic<C>, class = if_arithmetic<D>>
    constexpr vec(A a, B b, C c, D d) : x(T(a)), y(T(b)), z(T(c)), w(T(d)) {}
    vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
    vec(vec<T, 3> a, T d) : x(a.x), y(a.y), z(a.z), w(d) {}
    vec(T a, vec<T, 3> b) : x(a), y(b.x), z(b.y), w(b.z) {}
    vec(vec<T, 2> a, T c, T d) : x(a.x), y(a.y), z(c), w(d) {}
    vec(T a, T b, vec<T, 2> c) : x(a), y(b), z(c.x), w(c.y) {}
    template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
    explicit vec(const vec<U, 4>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
    METALSIM_SUBSCRIPT
    METALSIM_SWIZZLES_4
};

// Component-wise application.
template <class F, class T, int N>
auto map(F f, const vec<T, N>& a) {
    vec<decltype(f(a.x)), N> r;
    for (int i = 0; i < N; i++) r[i] = f(a[i]);
    return r;
}
template <class F, class T, class U, int N>
auto map(F f, const vec<T, N>& a, const vec<U, N>& b) {
    vec<decltype(f(a.x, b.x)), N> r;
    for (int i = 0; i < N; i++) r[i] = f(a[i], b[i]);
    return r;
}

// Macros because an operator's token can't be a template argument.
#define METALSIM_BINARY(op)                                           \
    template <class T, int N>                                         \
    auto operator op(const vec<T, N>& a, const vec<T, N>& b) {        \
        return map(                                                   \
            [](T p, T q) {                                            \
                if constexpr (std::is_same_v<decltype(p op q), bool>) \
                    return p op q;                                    \
                else                                                  \
                    return T(p op q);                                 \
            },                                                        \
            a, b);                                                    \
    }                                                                 \
    template <class T, int N, class S, class = if_arithmetic<S>>      \
    auto operator op(const vec<T, N>& a, S b) {                       \
        return a op vec<T, N>(b);                                     \
    }                                                                 \
    template <class T, int N, class S, class = if_arithmetic<S>>      \
    auto operator op(S a, const vec<T, N>& b) {                       \
        return vec<T, N>(a) op b;                                     \
    }
#define METALSIM_ASSIGNING(op)                               \
    METALSIM_BINARY(op)                                      \
    template <class T, int N, class B>                       \
    vec<T, N>& operator op## = (vec<T, N> & a, const B& b) { \
        return a = a op b;                                   \
    }
METALSIM_ASSIGNING(+)
METALSIM_ASSIGNING(-)
METALSIM_ASSIGNING(*)
METALSIM_ASSIGNING(/)
METALSIM_ASSIGNING(%)
METALSIM_ASSIGNING(&)
METALSIM_ASSIGNING(|)
METALSIM_ASSIGNING(^)
METALSIM_ASSIGNING(<<)
METALSIM_ASSIGNING(>>)
METALSIM_BINARY(<)
METALSIM_BINARY(>)
METALSIM_BINARY(<=)
METALSIM_BINARY(>=)
METALSIM_BINARY(==)
METALSIM_BINARY(!=)
METALSIM_BINARY(&&)
METALSIM_BINARY(||)
template <class T, int N>
vec<T, N> operator-(const vec<T, N>& a) {
    return map([](T p) { return T(-p); }, a);
}
template <class T, int N>
vec<T, N> operator~(const vec<T, N>& a) {
    return map([](T p) { return T(~p); }, a);
}
template <int N>
bool all(const vec<bool, N>& v) {
    bool r = true;
    for (int i = 0; i < N; i++) r = r && v[i];
    return r;
}
template <int N>
bool any(const vec<bool, N>& v) {
    bool r = false;
    for (int i = 0; i < N; i++) r = r || v[i];
    return r;
}

// Packed vectors: the same components without the alignment.
template <class T, int N>
struct packed_vec {
    T v[N];
    packed_vec() = default;
    packed_vec(const vec<T, N>& o) {
        for (int i = 0; i < N; i++) v[i] = o[i];
    }
    operator vec<T, N>() const {
        vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = v[i];
        return r;
    }
    T& operator[](int i) { return v[i]; }
    const T& operator[](int i) const { return v[i]; }
};

#define METALSIM_VECTOR_NAMES(T)            \
    using T##2 = vec<T, 2>;                 \
    using T##3 = vec<T, 3>;                 \
    using T##4 = vec<T, 4>;                 \
    using packed_##T##2 = packed_vec<T, 2>; \
    using packed_##T##3 = packed_vec<T, 3>; \
    using packed_##T##4 = packed_vec<T, 4>;
METALSIM_VECTOR_NAMES(float)
METALSIM_VECTOR_NAMES(half)
METALSIM_VECTOR_NAMES(bfloat)
METALSIM_VECTOR_NAMES(int)
METALSIM_VECTOR_NAMES(uint)
METALSIM_VECTOR_NAMES(short)
METALSIM_VECTOR_NAMES(ushort)
METALSIM_VECTOR_NAMES(char)
METALSIM_VECTOR_NAMES(uchar)
METALSIM_VECTOR_NAMES(long)
METALSIM_VECTOR_NAMES(ulong)
METALSIM_VECTOR_NAMES(bool)
}  // namespace msl::metal
