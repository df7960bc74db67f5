// Products by tensor operations: fragments in registers, and four simdgroups over tensors in memory.
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

// c [16, 32] = a [16, 16] b, b [16, 32] or its transpose, by one simdgroup; lane map as MLX has it.
template <bool TRANSPOSED>
[[kernel]] void fragments(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]],
                          device float* c [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr auto descriptor = matmul2d_descriptor(16, 32, 16, false, TRANSPOSED, true,
                                                    matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroup> op;
    auto left = op.template get_left_input_cooperative_tensor<bfloat, bfloat, float>();
    auto right = op.template get_right_input_cooperative_tensor<bfloat, bfloat, float>();
    auto sum = op.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(left)>,
                                                              remove_addrspace_t<decltype(right)>, float>();
    const uint quad = lane >> 2;
    const uint row = (quad & 4u) | ((lane >> 1) & 3u);
    const uint column = ((quad & 2u) | (lane & 1u)) * 4u;
    for (uint e = 0u; e < 8u; ++e) {
        const uint r = row + 8u * (e >> 2);
        const uint k = column + (e & 3u);
        left[e] = a[r * 16u + k];
        for (uint f = 0u; f < 2u; ++f) {
            right[8u * f + e] = TRANSPOSED ? b[(16u * f + r) * 16u + k] : b[r * 32u + 16u * f + k];
            sum[8u * f + e] = 0.5f;
        }
    }
    op.run(left, right, sum);
    for (uint e = 0u; e < 8u; ++e) {
        const uint at = (row + 8u * (e >> 2)) * 32u + column + (e & 3u);
        c[at] = sum[e];
        c[at + 16u] = sum[8u + e];
    }
}
template [[host_name("fragments_plain")]] [[kernel]] decltype(fragments<false>) fragments<false>;
template [[host_name("fragments_transposed")]] [[kernel]] decltype(fragments<true>) fragments<true>;

// c [rows, 32] = a [rows, depth] b^T, b [32, depth], by four simdgroups in steps of 16 columns.
[[kernel]] void four(device bfloat* a [[buffer(0)]], device bfloat* b [[buffer(1)]],
                     device float* c [[buffer(2)]], constant uint2& size [[buffer(3)]],
                     uint index [[thread_index_in_threadgroup]]) {
    threadgroup bfloat tile[512];
    constexpr auto descriptor = matmul2d_descriptor(32, 32, 16, false, true, false,
                                                    matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroups<4>> op;
    tensor<device bfloat, dextents<int32_t, 2>, tensor_inline> left(
        a, dextents<int32_t, 2>(int(size.y), int(size.x)));
    tensor<threadgroup bfloat, extents<int32_t, 16, 32>, tensor_inline> right(tile, extents<int32_t, 16, 32>());
    auto sum = op.template get_destination_cooperative_tensor<
        tensor<device bfloat, dextents<int32_t, 2>, tensor_inline>,
        tensor<threadgroup bfloat, extents<int32_t, 16, 32>, tensor_inline>, float>();
    for (ushort i = 0; i < sum.get_capacity(); ++i) sum[i] = 0.0f;
    for (uint k = 0u; k < size.y; k += 16u) {
        for (uint i = index; i < 512u; i += 128u) tile[i] = b[i / 16u * size.y + k + i % 16u];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        auto slice = left.slice(int(k), 0);
        op.run(slice, right, sum);
#ifndef FORGET
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
    }
    for (ushort i = 0; i < sum.get_capacity(); ++i) {
        auto at = sum.get_multidimensional_index(i);
        if (sum.is_valid_element(i) && uint(at[1]) < size.x) c[uint(at[1]) * 32u + uint(at[0])] = sum[i];
    }
}
