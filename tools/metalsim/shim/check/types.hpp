// Check build (clang's C++ for OpenCL mode): Metal's types and traits. Nothing here runs; only types,
// overloads and address spaces matter. OpenCL's address spaces are Metal's under other names.
#pragma once
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong uintptr_t;
typedef __bf16 bfloat;
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
// OpenCL C's own atomic types have these names.
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#define atomic_bool msl_atomic_bool
#define atomic_ulong msl_atomic_ulong
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define MAXFLOAT 3.402823466e+38f

namespace metal {
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::size_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <typename T, int N>
struct packed_vec {
    T v[N];
    packed_vec() = default;
    packed_vec(vec<T, N> o);
    operator vec<T, N>() const;
    operator vec<T, N>() const device;
    operator vec<T, N>() const constant;
    operator vec<T, N>() const threadgroup;
    thread T& operator[](int i) thread;
    device T& operator[](int i) device;
    T operator[](int i) const constant;
    threadgroup T& operator[](int i) threadgroup;
};
#define METALSIM_VECTORS(T)                 \
    using T##2 = vec<T, 2>;                 \
    using T##3 = vec<T, 3>;                 \
    using T##4 = vec<T, 4>;                 \
    using packed_##T##2 = packed_vec<T, 2>; \
    using packed_##T##3 = packed_vec<T, 3>; \
    using packed_##T##4 = packed_vec<T, 4>;
METALSIM_VECTORS(float)
METALSIM_VECTORS(half)
METALSIM_VECTORS(bfloat)
METALSIM_VECTORS(int)
METALSIM_VECTORS(uint)
METALSIM_VECTORS(short)
METALSIM_VECTORS(ushort)
METALSIM_VECTORS(char)
METALSIM_VECTORS(uchar)
METALSIM_VECTORS(long)
METALSIM_VECTORS(ulong)
// OpenCL has no vectors of bool.
using bool2 = vec<char, 2>;
using bool3 = vec<char, 3>;
using bool4 = vec<char, 4>;

template <typename T, T V>
struct integral_constant {
    static constant constexpr T value = V;
    using type = integral_constant;
    constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <typename A, typename B>
struct is_same : false_type {};
template <typename A>
struct is_same<A, A> : true_type {};
template <typename A, typename B>
constant constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
    using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename X, typename Y>
struct conditional {
    using type = X;
};
template <typename X, typename Y>
struct conditional<false, X, Y> {
    using type = Y;
};
template <bool B, typename X, typename Y>
using conditional_t = typename conditional<B, X, Y>::type;
template <typename T>
struct remove_cv {
    using type = T;
};
template <typename T>
struct remove_cv<const T> {
    using type = T;
};
template <typename T>
struct remove_cv<volatile T> {
    using type = T;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
struct remove_reference {
    using type = T;
};
template <typename T>
struct remove_reference<T&> {
    using type = T;
};
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
struct remove_addrspace {
    using type = T;
};
template <typename T>
struct remove_addrspace<device T> {
    using type = T;
};
template <typename T>
struct remove_addrspace<constant T> {
    using type = T;
};
template <typename T>
struct remove_addrspace<threadgroup T> {
    using type = T;
};
template <typename T>
struct remove_addrspace<thread T> {
    using type = T;
};
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <typename T>
T declval();
template <typename T>
constant constexpr bool is_integral_v = __is_integral(T);
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
constant constexpr bool is_floating_point_v =
    __is_floating_point(T) || is_same_v<T, bfloat> || is_same_v<T, half>;
template <typename T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T>
constant constexpr bool is_signed_v = __is_signed(T);
template <typename T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <typename T>
constant constexpr bool is_unsigned_v = __is_unsigned(T);
template <typename T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <typename A, typename B>
constant constexpr bool is_convertible_v = __is_convertible(A, B);
template <typename T>
struct make_unsigned {
    using type = __make_unsigned(T);
};
template <typename T>
using make_unsigned_t = typename make_unsigned<T>::type;

template <typename T>
struct numeric_limits {
    static constexpr T infinity() { return T(__builtin_inff()); }
    static constexpr T quiet_NaN() { return T(0); }
    static constexpr T max() { return T(0); }
    static constexpr T min() { return T(0); }
    static constexpr T lowest() { return T(0); }
    static constexpr T epsilon() { return T(0); }
};
template <typename T, size_t N>
struct array {
    T elements[N];
    thread T& operator[](size_t i) thread;
    T operator[](size_t i) const thread;
    T operator[](size_t i) const constant;
    device T& operator[](size_t i) device;
    threadgroup T& operator[](size_t i) threadgroup;
};

template <typename T>
struct component_count {
    enum : int { value = 1 };
};
template <typename T, int N>
struct component_count<T __attribute__((ext_vector_type(N)))> {
    enum : int { value = N };
};

// The rewriter turns float4(a, b, ...) into make_vector<float4>(a, b, ...).
template <typename V, typename A>
V make_vector(A a) {
    static_assert(component_count<A>::value == 1 || component_count<A>::value == component_count<V>::value,
                  "a vector is made from a scalar or from a vector of as many components");
    V v;
    return v;
}
template <typename V, typename A, typename B, typename... C>
V make_vector(A a, B b, C... c) {
    static_assert(
        component_count<A>::value + component_count<B>::value + (0 + ... + component_count<C>::value) ==
            component_count<V>::value,
        "the components given are not as many as the vector has");
    V v;
    return v;
}
template <typename D, typename S>
D as_type(S s) {
    static_assert(sizeof(D) == sizeof(S), "as_type between types of different size");
    D d;
    return d;
}

// The rewriter declares threadgroup variables as references to these.
template <typename T>
using Identity = T;
template <typename T>
threadgroup T& threadgroup_reference();
#define is_function_constant_defined(x) (true)
}  // namespace metal
using metal::as_type;
