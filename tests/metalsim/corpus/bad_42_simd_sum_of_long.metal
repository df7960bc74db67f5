#include <metal_stdlib>
using namespace metal;
kernel void k(device long* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] = simd_sum(a[i]); }
