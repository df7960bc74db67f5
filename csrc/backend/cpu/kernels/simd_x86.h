// Sixteen lanes joined to one number with AVX; see simd.h.
#pragma once

#include <immintrin.h>

namespace lily::cpu {
namespace LILY_ISA {

// All lanes joined by halving the vector: the same order on every machine.
template <typename Join>
inline float halve(__m256 low, __m256 high, Join join) {
    const auto widen = [](__m128 x) { return _mm256_castps128_ps256(x); };
    const auto narrow = [](__m256 x) { return _mm256_castps256_ps128(x); };
    const __m256 eight = join(low, high);
    const __m128 four = narrow(join(eight, widen(_mm256_extractf128_ps(eight, 1))));
    const __m128 two = narrow(join(widen(four), widen(_mm_movehl_ps(four, four))));
    return _mm_cvtss_f32(narrow(join(widen(two), widen(_mm_movehdup_ps(two)))));
}
inline __m256 join_sum(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
inline __m256 join_largest(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

}  // namespace LILY_ISA
}  // namespace lily::cpu
