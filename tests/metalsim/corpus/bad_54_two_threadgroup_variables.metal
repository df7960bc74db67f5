#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]]) { threadgroup float b[(2 + 2)], c[4]; b[0] = c[0] = a[0]; }
