#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]], uint3 g [[threadgroup_position_in_grid]]) { a[i] = g.x; }
