// Scalar types, type traits and limits of the Metal standard library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using bfloat = __bf16;

inline constexpr half operator""h(long double v) { return half(v); }
inline constexpr half operator""h(unsigned long long v) { return half(v); }

#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#ifndef MAXFLOAT
#define MAXFLOAT 3.402823466e+38f
#endif

namespace msl::metal {
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::size_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::declval;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::is_integral;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::is_signed;
using std::is_signed_v;
using std::is_unsigned;
using std::is_unsigned_v;
using std::make_unsigned;
using std::make_unsigned_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;
template <class T>
using remove_addrspace_t = T;

template <class T>
inline constexpr bool is_floating_point_v =
    std::is_floating_point_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
inline constexpr bool is_arithmetic_v = std::is_arithmetic_v<T> || is_floating_point_v<T>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
    static constexpr half infinity() { return half(__builtin_inff()); }
    static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
    static constexpr half max() { return half(65504.f); }
    static constexpr half lowest() { return half(-65504.f); }
    static constexpr half min() { return half(6.103515625e-05f); }
    static constexpr half epsilon() { return half(9.765625e-4f); }
};
template <>
struct numeric_limits<bfloat> {
    static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
    static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
    static constexpr bfloat max() { return bfloat(3.38953138925e38f); }
    static constexpr bfloat lowest() { return bfloat(-3.38953138925e38f); }
    static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
    static constexpr bfloat epsilon() { return bfloat(7.8125e-3f); }
};

// Bit cast between types of equal size.
template <class D, class S>
D as_type(S s) {
    static_assert(sizeof(D) == sizeof(S), "as_type between types of different size");
    D d;
    memcpy((void*)&d, (const void*)&s, sizeof d);
    return d;
}

template <class T, size_t N>
struct array {
    T elements[N];
    T& operator[](size_t i) { return elements[i]; }
    const T& operator[](size_t i) const { return elements[i]; }
    static constexpr size_t size() { return N; }
};
}  // namespace msl::metal
using msl::metal::as_type;
