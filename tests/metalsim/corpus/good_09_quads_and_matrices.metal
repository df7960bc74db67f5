#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]], threadgroup half* s [[threadgroup(0)]], ushort q [[thread_index_in_quadgroup]]) { simdgroup_half8x8 m; simdgroup_load(m, s, 8); simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); simdgroup_multiply_accumulate(c, m, m, c); simdgroup_store(c, a, 8); a[q] = quad_sum(float(q)) + quad_shuffle_xor(1.0f, 1); }
