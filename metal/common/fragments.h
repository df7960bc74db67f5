// 8x8 matrices of a simdgroup as two neighbouring values of a row per lane.
//
// Which two is not documented: row (lane / 4 & 4) + lane / 2 % 4, columns (lane / 4 & 2) * 2 + lane % 2 * 2
// and the next, on every Apple GPU so far. The self-test at load compares a product with known numbers, so
// another map would be noticed. Lanes of one row differ in bits 0 and 3.
#pragma once
#include <metal_simdgroup_matrix>
#include "common/numbers.h"

typedef simdgroup_matrix<float, 8, 8> Fragment;

inline uint fragment_row(uint lane) { return (lane / 4u & 4u) + lane / 2u % 4u; }

inline uint fragment_column(uint lane) { return (lane / 4u & 2u) * 2u + lane % 2u * 2u; }

inline Fragment fragment(float x, float y) {
    Fragment m;
    m.thread_elements()[0] = x;
    m.thread_elements()[1] = y;
    return m;
}

inline float2 fragment_values(Fragment m) { return float2(m.thread_elements()[0], m.thread_elements()[1]); }

// The sum and the maximum over the lanes of a row, in all of them.
inline float fragment_row_sum(float value) {
    value = value + simd_shuffle_xor(value, ushort(1));
    return value + simd_shuffle_xor(value, ushort(8));
}

inline float fragment_row_max(float value) {
    value = max(value, simd_shuffle_xor(value, ushort(1)));
    return max(value, simd_shuffle_xor(value, ushort(8)));
}
