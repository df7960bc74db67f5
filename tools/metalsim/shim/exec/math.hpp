// Math functions. Half and bfloat arguments are computed in float and rounded once.
#pragma once
#include "vector.hpp"

namespace msl::metal {
template <class T>
using arithmetic_t = std::enable_if_t<is_arithmetic_v<T>, T>;

#define METALSIM_UNARY(name, expression)              \
    inline float name(float x) { return expression; } \
    inline half name(half h) {                        \
        float x = h;                                  \
        return half(expression);                      \
    }                                                 \
    inline bfloat name(bfloat b) {                    \
        float x = b;                                  \
        return bfloat(expression);                    \
    }                                                 \
    template <class T, int N>                         \
    vec<T, N> name(const vec<T, N>& a) {              \
        return map([](T p) { return name(p); }, a);   \
    }
#define METALSIM_TRANSCENDENTAL              \
    METALSIM_UNARY(exp, ::expf(x))           \
    METALSIM_UNARY(exp2, ::exp2f(x))         \
    METALSIM_UNARY(exp10, ::powf(10.0f, x))  \
    METALSIM_UNARY(log, ::logf(x))           \
    METALSIM_UNARY(log2, ::log2f(x))         \
    METALSIM_UNARY(log10, ::log10f(x))       \
    METALSIM_UNARY(sqrt, ::sqrtf(x))         \
    METALSIM_UNARY(rsqrt, 1.0f / ::sqrtf(x)) \
    METALSIM_UNARY(sin, ::sinf(x))           \
    METALSIM_UNARY(cos, ::cosf(x))           \
    METALSIM_UNARY(tan, ::tanf(x))           \
    METALSIM_UNARY(asin, ::asinf(x))         \
    METALSIM_UNARY(acos, ::acosf(x))         \
    METALSIM_UNARY(atan, ::atanf(x))         \
    METALSIM_UNARY(sinh, ::sinhf(x))         \
    METALSIM_UNARY(cosh, ::coshf(x))         \
    METALSIM_UNARY(tanh, ::tanhf(x))         \
    METALSIM_UNARY(asinh, ::asinhf(x))       \
    METALSIM_UNARY(acosh, ::acoshf(x))       \
    METALSIM_UNARY(atanh, ::atanhf(x))       \
    METALSIM_UNARY(floor, ::floorf(x))       \
    METALSIM_UNARY(ceil, ::ceilf(x))         \
    METALSIM_UNARY(rint, ::rintf(x))         \
    METALSIM_UNARY(round, ::roundf(x))       \
    METALSIM_UNARY(trunc, ::truncf(x))       \
    METALSIM_UNARY(fract, x - ::floorf(x))   \
    METALSIM_UNARY(fabs, ::fabsf(x))         \
    METALSIM_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
#define METALSIM_BINARY_MATH                                                      \
    inline float pow(float a, float b) { return ::powf(a, b); }                   \
    inline float powr(float a, float b) { return ::powf(a, b); }                  \
    inline float fmod(float a, float b) { return ::fmodf(a, b); }                 \
    inline float fmin(float a, float b) { return ::fminf(a, b); }                 \
    inline float fmax(float a, float b) { return ::fmaxf(a, b); }                 \
    inline float atan2(float a, float b) { return ::atan2f(a, b); }               \
    inline float divide(float a, float b) { return a / b; }                       \
    inline float copysign(float a, float b) { return __builtin_copysignf(a, b); } \
    inline float ldexp(float a, int e) { return ::ldexpf(a, e); }
METALSIM_TRANSCENDENTAL
METALSIM_BINARY_MATH
namespace precise {
METALSIM_TRANSCENDENTAL
METALSIM_BINARY_MATH
}  // namespace precise
namespace fast {
METALSIM_TRANSCENDENTAL
METALSIM_BINARY_MATH
}  // namespace fast

template <class T>
arithmetic_t<T> min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
arithmetic_t<T> max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
arithmetic_t<T> clamp(T v, T lo, T hi) {
    return min(max(v, lo), hi);
}
template <class T>
arithmetic_t<T> abs(T a) {
    return a < T(0) ? T(-a) : a;
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
template <class T>
arithmetic_t<T> mix(T a, T b, T t) {
    return T(a + (b - a) * t);
}
template <class T>
arithmetic_t<T> step(T edge, T x) {
    return x < edge ? T(0) : T(1);
}
inline float frexp(float x, int& exponent) { return ::frexpf(x, &exponent); }
template <class T>
arithmetic_t<T> select(T a, T b, bool c) {
    return c ? b : a;
}
template <class T, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    for (int i = 0; i < N; i++)
        if (c[i]) a[i] = b[i];
    return a;
}
template <class T, int N>
vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
    return map([](T p, T q) { return min(p, q); }, a, b);
}
template <class T, int N>
vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
    return map([](T p, T q) { return max(p, q); }, a, b);
}
template <class T, int N>
vec<T, N> clamp(const vec<T, N>& v, const vec<T, N>& lo, const vec<T, N>& hi) {
    return min(max(v, lo), hi);
}
template <class T, int N>
vec<T, N> abs(const vec<T, N>& a) {
    return map([](T p) { return abs(p); }, a);
}
template <class T, int N>
vec<T, N> fma(vec<T, N> a, const vec<T, N>& b, const vec<T, N>& c) {
    for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
    return a;
}
template <class T, int N>
T dot(const vec<T, N>& a, const vec<T, N>& b) {
    T s = a[0] * b[0];
    for (int i = 1; i < N; i++) s = T(s + a[i] * b[i]);
    return s;
}
template <class T, int N>
T length_squared(const vec<T, N>& a) {
    return dot(a, a);
}
template <class T, int N>
T length(const vec<T, N>& a) {
    return sqrt(dot(a, a));
}

inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }

template <class T>
T popcount(T v) {
    return T(__builtin_popcountll(std::make_unsigned_t<T>(v)));
}
template <class T>
T clz(T v) {
    return v ? T(__builtin_clzll(std::make_unsigned_t<T>(v)) - (64 - 8 * int(sizeof(T)))) : T(8 * sizeof(T));
}
template <class T>
T ctz(T v) {
    return v ? T(__builtin_ctzll(std::make_unsigned_t<T>(v))) : T(8 * sizeof(T));
}
template <class T>
T reverse_bits(T v) {
    std::make_unsigned_t<T> u = v, r = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); i++) r |= ((u >> i) & 1) << (8 * sizeof(T) - 1 - i);
    return T(r);
}
template <class T>
T rotate(T v, T by) {
    using U = std::make_unsigned_t<T>;
    constexpr unsigned bits = 8 * sizeof(T);
    unsigned n = unsigned(U(by)) % bits;
    return n ? T((U(v) << n) | (U(v) >> (bits - n))) : v;
}
inline uint mulhi(uint a, uint b) { return uint((uint64_t(a) * b) >> 32); }
inline int mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
template <class T>
T extract_bits(T v, uint offset, uint bits) {
    using U = std::make_unsigned_t<T>;
    if (!bits) return 0;
    U u = U(v) >> offset;
    if (bits < 8 * sizeof(T)) {
        u &= U((U(1) << bits) - 1);
        if (std::is_signed_v<T> && (u >> (bits - 1))) u |= U(~((U(1) << bits) - 1));
    }
    return T(u);
}
template <class T>
T insert_bits(T base, T insert, uint offset, uint bits) {
    using U = std::make_unsigned_t<T>;
    if (!bits) return base;
    U mask = bits < 8 * sizeof(T) ? U((U(1) << bits) - 1) << offset : U(~U(0));
    return T((U(base) & ~mask) | ((U(insert) << offset) & mask));
}
}  // namespace msl::metal
