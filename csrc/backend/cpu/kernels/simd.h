// Sixteen lanes of fp32 or int32, the same on every instruction set.
//
// Kernels are written once on these types and compiled once per instruction set. Every operation rounds the
// same way everywhere (multiplications and additions are fused only where `fma` is written, lanes are joined
// by halving the vector, and of two numbers that are not ordered `max` and `min` take the second), so all
// builds give the same bits. LILY_BYTE_DOTS says that there are dot products of bytes.
#pragma once

namespace lily::cpu {
namespace LILY_ISA {

constexpr int kLanes = 16;

}  // namespace LILY_ISA
}  // namespace lily::cpu

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "backend/cpu/kernels/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "backend/cpu/kernels/simd_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "backend/cpu/kernels/simd_neon.h"
#else
#include "backend/cpu/kernels/simd_plain.h"
#endif

namespace lily::cpu {
namespace LILY_ISA {

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
