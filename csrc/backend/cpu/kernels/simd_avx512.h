// Sixteen lanes as one AVX-512 register; see simd.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels/simd_x86.h"

namespace lily::cpu {
namespace LILY_ISA {

struct F32 {
    __m512 v;
    static F32 zero() { return {_mm512_setzero_ps()}; }
    static F32 set(float x) { return {_mm512_set1_ps(x)}; }
    static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F32 load_bf16(const uint16_t* p) {
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
    }
    static F32 load_int8(const int8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
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
inline float sum(F32 a) {
    return halve(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1), join_sum);
}
inline float largest(F32 a) {
    return halve(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1), join_largest);
}

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

// The lanes as 16-bit integers, in each run of eight in the order 0 4 1 5 2 6 3 7.
inline void store_pairs(I32 a, int16_t* out) {
    const __m512i fours = _mm512_shuffle_i32x4(a.v, a.v, 0xb1);
    const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, a.v, _mm512_slli_epi32(fours, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_castsi512_si256(_mm512_shuffle_i32x4(words, words, 0x08)));
}

// The low byte of each lane.
inline void store_bytes(I32 a, int8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a.v));
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

}  // namespace LILY_ISA
}  // namespace lily::cpu
