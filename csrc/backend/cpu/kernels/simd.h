// Sixteen lanes of fp32 or int32, the same on every instruction set.
//
// Kernels are written once on these types and compiled once per instruction set. Every operation here rounds
// the same way everywhere (multiplications and additions are fused only where `fma` is written), so all
// builds give the same bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/numeric.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace lily::cpu {
namespace LILY_ISA {

constexpr int kLanes = 16;

// Asks for a cache line. Written out on x86: GCC drops calls to functions that do nothing but prefetch.
inline void prefetch(const std::byte* p) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*p));
#else
    __builtin_prefetch(p, 0, 3);
#endif
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct F32 {
    __m512 v;
    static F32 zero() { return {_mm512_setzero_ps()}; }
    static F32 set(float x) { return {_mm512_set1_ps(x)}; }
    static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F32 load_bf16(const uint16_t* p) {
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    friend F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
};
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }

struct I32 {
    __m512i v;
    static I32 zero() { return {_mm512_setzero_si512()}; }
    static I32 set(int32_t x) { return {_mm512_set1_epi32(x)}; }
    static I32 load(const void* p) { return {_mm512_loadu_si512(p)}; }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    friend I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
    friend I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
    friend I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
    friend I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
};
template <int N>
inline I32 shift_right(I32 a) {
    return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
inline I32 shift_left(I32 a) {
    return {_mm512_slli_epi32(a.v, N)};
}
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even
inline F32 bits_to_float(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I32 float_to_bits(F32 a) { return {_mm512_castps_si512(a.v)}; }

// acc + a.lo * b.lo + a.hi * b.hi on the two signed 16-bit halves of each lane
inline I32 dot_pairs(I32 acc, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
    // The intrinsic costs two register moves per product in GCC's loops; the tied operand costs none.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
#else
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}

// Lane i of out[j] is the 32-bit word j of the 16 bytes at rows + i * stride.
inline void transpose_words(const std::byte* rows, int64_t stride, I32 out[4]) {
    const auto row = [&](int64_t i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
    };
    __m512i r[4];
    for (int i = 0; i < 4; ++i) {
        __m512i x = _mm512_castsi128_si512(row(i));
        x = _mm512_mask_broadcast_i32x4(x, 0x00f0, row(i + 4));
        x = _mm512_mask_broadcast_i32x4(x, 0x0f00, row(i + 8));
        r[i] = _mm512_mask_broadcast_i32x4(x, 0xf000, row(i + 12));
    }
    const __m512i ab_lo = _mm512_unpacklo_epi32(r[0], r[1]);
    const __m512i ab_hi = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i cd_lo = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i cd_hi = _mm512_unpackhi_epi32(r[2], r[3]);
    out[0] = {_mm512_unpacklo_epi64(ab_lo, cd_lo)};
    out[1] = {_mm512_unpackhi_epi64(ab_lo, cd_lo)};
    out[2] = {_mm512_unpacklo_epi64(ab_hi, cd_hi)};
    out[3] = {_mm512_unpackhi_epi64(ab_hi, cd_hi)};
}

#if defined(__AVX512VNNI__)
#define LILY_BYTE_DOTS 1  // the byte operations below exist

// acc + sum of four products of unsigned bytes of a and signed bytes of b, in each lane
inline I32 dot_bytes(I32 acc, I32 a, I32 b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
}

// Sums of the first and of the last eight lanes of 16 vectors: lane i of out[0] and out[1] is vector i's.
inline void sum_halves(const I32* rows, I32 out[2]) {
    __m512i quads[4];
    for (int i = 0; i < 4; ++i) {
        const __m512i a = rows[4 * i].v;
        const __m512i b = rows[4 * i + 1].v;
        const __m512i c = rows[4 * i + 2].v;
        const __m512i d = rows[4 * i + 3].v;
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        quads[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    const auto join = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    };
    const __m512i low = join(quads[0], quads[1]);
    const __m512i high = join(quads[2], quads[3]);
    out[0] = {_mm512_shuffle_i32x4(low, high, 0x88)};
    out[1] = {_mm512_shuffle_i32x4(low, high, 0xdd)};
}
#endif

#elif defined(__AVX2__) && defined(__FMA__)

struct F32 {
    __m256 lo, hi;
    static F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F32 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F32 load_bf16(const uint16_t* p) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    friend F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
    friend F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
    friend F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    friend F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
};
inline F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32 abs(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

struct I32 {
    __m256i lo, hi;
    static I32 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static I32 set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    static I32 load(const void* p) {
        const auto* q = static_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    void store(void* p) const {
        auto* q = static_cast<__m256i*>(p);
        _mm256_storeu_si256(q, lo);
        _mm256_storeu_si256(q + 1, hi);
    }
    friend I32 operator+(I32 a, I32 b) {
        return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
    }
    friend I32 operator-(I32 a, I32 b) {
        return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
    }
    friend I32 operator&(I32 a, I32 b) {
        return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
    }
    friend I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
};
template <int N>
inline I32 shift_right(I32 a) {
    return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
inline I32 shift_left(I32 a) {
    return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32 round_to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F32 bits_to_float(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I32 float_to_bits(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

inline I32 dot_pairs(I32 acc, I32 a, I32 b) {
#if defined(__AVXVNNI__)
    return {_mm256_dpwssd_avx_epi32(acc.lo, a.lo, b.lo), _mm256_dpwssd_avx_epi32(acc.hi, a.hi, b.hi)};
#else
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
#endif
}

inline void transpose_words(const std::byte* rows, int64_t stride, I32 out[4]) {
    __m256i half[2][4];
    for (int h = 0; h < 2; ++h) {
        __m256i r[4];
        for (int i = 0; i < 4; ++i) {
            const auto* a = reinterpret_cast<const __m128i*>(rows + (8 * h + i) * stride);
            const auto* b = reinterpret_cast<const __m128i*>(rows + (8 * h + i + 4) * stride);
            r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(a)), _mm_loadu_si128(b), 1);
        }
        const __m256i ab_lo = _mm256_unpacklo_epi32(r[0], r[1]);
        const __m256i ab_hi = _mm256_unpackhi_epi32(r[0], r[1]);
        const __m256i cd_lo = _mm256_unpacklo_epi32(r[2], r[3]);
        const __m256i cd_hi = _mm256_unpackhi_epi32(r[2], r[3]);
        half[h][0] = _mm256_unpacklo_epi64(ab_lo, cd_lo);
        half[h][1] = _mm256_unpackhi_epi64(ab_lo, cd_lo);
        half[h][2] = _mm256_unpacklo_epi64(ab_hi, cd_hi);
        half[h][3] = _mm256_unpackhi_epi64(ab_hi, cd_hi);
    }
    for (int j = 0; j < 4; ++j) out[j] = {half[0][j], half[1][j]};
}

#else  // any machine: arrays that the compiler vectorises

struct F32 {
    float v[kLanes];
    static F32 zero() { return set(0.0f); }
    static F32 set(float x) {
        F32 r;
        for (float& e : r.v) e = x;
        return r;
    }
    static F32 load(const float* p) {
        F32 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static F32 load_bf16(const uint16_t* p) {
        F32 r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = bf16_to_float(p[i]);
        return r;
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    template <typename F>
    static F32 map(F32 a, F32 b, F f) {
        F32 r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = f(a.v[i], b.v[i]);
        return r;
    }
    friend F32 operator+(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x + y; });
    }
    friend F32 operator-(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x - y; });
    }
    friend F32 operator*(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x * y; });
    }
    friend F32 operator/(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x / y; });
    }
};
inline F32 fma(F32 a, F32 b, F32 c) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return r;
}
inline F32 max(F32 a, F32 b) {
    return F32::map(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline F32 min(F32 a, F32 b) {
    return F32::map(a, b, [](float x, float y) { return x < y ? x : y; });
}
inline F32 abs(F32 a) {
    return F32::map(a, a, [](float x, float) { return std::fabs(x); });
}

struct I32 {
    int32_t v[kLanes];
    static I32 zero() { return set(0); }
    static I32 set(int32_t x) {
        I32 r;
        for (int32_t& e : r.v) e = x;
        return r;
    }
    static I32 load(const void* p) {
        I32 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    void store(void* p) const { std::memcpy(p, v, sizeof v); }
    template <typename F>
    static I32 map(I32 a, I32 b, F f) {
        I32 r;
        for (int i = 0; i < kLanes; ++i) {
            r.v[i] = static_cast<int32_t>(f(static_cast<uint32_t>(a.v[i]), static_cast<uint32_t>(b.v[i])));
        }
        return r;
    }
    friend I32 operator+(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x + y; });
    }
    friend I32 operator-(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x - y; });
    }
    friend I32 operator&(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x & y; });
    }
    friend I32 operator|(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x | y; });
    }
};
template <int N>
inline I32 shift_right(I32 a) {
    return I32::map(a, a, [](uint32_t x, uint32_t) { return x >> N; });
}
template <int N>
inline I32 shift_left(I32 a) {
    return I32::map(a, a, [](uint32_t x, uint32_t) { return x << N; });
}
inline F32 to_float(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(a.v[i]);
    return r;
}
inline I32 round_to_int(F32 a) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
    return r;
}
inline F32 bits_to_float(I32 a) {
    F32 r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline I32 float_to_bits(F32 a) {
    I32 r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline I32 dot_pairs(I32 acc, I32 a, I32 b) {
    for (int i = 0; i < kLanes; ++i) {
        acc.v[i] +=
            static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]) + (a.v[i] >> 16) * (b.v[i] >> 16);
    }
    return acc;
}
inline void transpose_words(const std::byte* rows, int64_t stride, I32 out[4]) {
    for (int i = 0; i < kLanes; ++i) {
        int32_t words[4];
        std::memcpy(words, rows + i * stride, sizeof words);
        for (int j = 0; j < 4; ++j) out[j].v[i] = words[j];
    }
}

#endif

// The sum of all lanes, halving the vector: the same order on every machine.
inline float sum(F32 a) {
    float v[kLanes];
    a.store(v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    }
    return v[0];
}

inline float largest(F32 a) {
    float v[kLanes];
    a.store(v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    }
    return v[0];
}

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial of degree 7 in r. The argument is
// clamped to [-87, 88]; NaN stays NaN, because min and max return their second argument then.
inline F32 exp(F32 x) {
    const F32 clamped = min(F32::set(88.0f), max(F32::set(-87.0f), x));
    const I32 n = round_to_int(clamped * F32::set(1.44269504088896341f));
    const F32 nf = to_float(n);
    F32 r = fma(nf, F32::set(-0.693359375f), clamped);
    r = fma(nf, F32::set(2.12194440e-4f), r);
    F32 p = F32::set(1.9875691500e-4f);
    p = fma(p, r, F32::set(1.3981999507e-3f));
    p = fma(p, r, F32::set(8.3334519073e-3f));
    p = fma(p, r, F32::set(4.1665795894e-2f));
    p = fma(p, r, F32::set(1.6666665459e-1f));
    p = fma(p, r, F32::set(5.0000001201e-1f));
    const F32 e = fma(p * r, r, r) + F32::set(1.0f);
    const I32 scale = shift_left<23>(n + I32::set(127));
    return e * bits_to_float(scale);
}

inline F32 sigmoid(F32 x) { return F32::set(1.0f) / (F32::set(1.0f) + exp(F32::zero() - x)); }
inline F32 silu(F32 x) { return x * sigmoid(x); }

}  // namespace LILY_ISA
}  // namespace lily::cpu
