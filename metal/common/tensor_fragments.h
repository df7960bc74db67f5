// 16x16 fragments of tensor operations as eight values of a lane (Metal 4).
//
// Element e: row tensor_row(lane) + 8 (e / 4), column tensor_column(lane) + e % 4; the lanes of a row differ
// in bits 0 and 3, as in fragments.h. Not documented: a host compares a product with another path before it
// uses one. LILY_TENSOR_TILES builds go without register operands, which the headers of macOS 26.0 and 26.1
// don't have.
#pragma once
#include "common/numbers.h"

#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace mpp::tensor_ops;

constant constexpr const bool kRelaxed = sizeof(Activation) == 2;

#ifndef LILY_TENSOR_TILES

inline uint tensor_row(uint lane) { return (lane / 4u & 4u) | (lane / 2u % 4u); }

inline uint tensor_column(uint lane) { return ((lane / 4u & 2u) | (lane & 1u)) * 4u; }

// c += a b: a one fragment; b two, [16, 32] side by side, or the transpose of [32, 16] above each other.
template <bool TRANSPOSED>
inline void multiply_fragments(thread const Activation* a, thread const Activation* b, thread float* c) {
    constexpr auto descriptor = matmul2d_descriptor(16, 32, 16, false, TRANSPOSED, kRelaxed,
                                                    matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroup> op;
    auto left = op.template get_left_input_cooperative_tensor<Activation, Activation, float>();
    auto right = op.template get_right_input_cooperative_tensor<Activation, Activation, float>();
    auto sum = op.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(left)>,
                                                              remove_addrspace_t<decltype(right)>, float>();
#pragma clang loop unroll(full)
    for (ushort i = 0; i < 8; ++i) left[i] = a[i];
#pragma clang loop unroll(full)
    for (ushort i = 0; i < 16; ++i) {
        right[i] = b[i];
        sum[i] = c[i];
    }
    op.run(left, right, sum);
#pragma clang loop unroll(full)
    for (ushort i = 0; i < 16; ++i) c[i] = sum[i];
}

// Four neighbouring values as elements of a fragment.
template <typename Four>
inline void take_four(Four four, thread Activation* to) {
    to[0] = Activation(float(four.x));
    to[1] = Activation(float(four.y));
    to[2] = Activation(float(four.z));
    to[3] = Activation(float(four.w));
}

#endif
