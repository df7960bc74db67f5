// Sixteen lanes as two AVX2 registers; see simd.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels/simd_x86.h"

namespace lily::cpu {
namespace LILY_ISA {

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
    static F32 load_int8(const int8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
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
inline float sum(F32 a) { return halve(a.lo, a.hi, join_sum); }
inline float largest(F32 a) { return halve(a.lo, a.hi, join_largest); }

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

// The lanes as 16-bit integers, in each run of eight in the order 0 4 1 5 2 6 3 7.
inline void store_pairs(I32 a, int16_t* out) {
    const auto run = [](__m256i x) {
        const __m128i fours = _mm256_extracti128_si256(x, 1);
        return _mm_blend_epi16(_mm256_castsi256_si128(x), _mm_slli_epi32(fours, 16), 0xaa);
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), run(a.lo));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), run(a.hi));
}

// The low byte of each lane.
inline void store_bytes(I32 a, int8_t* out) {
    const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4,
                                           8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const auto eight = [&](__m256i x) {
        const __m256i bytes = _mm256_shuffle_epi8(x, first);
        return _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(eight(a.lo), eight(a.hi)));
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
