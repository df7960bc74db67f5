#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]]) { threadgroup float s = 1; a[0] = s; }
