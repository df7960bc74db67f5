#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
kernel void k(device float* a [[buffer(0)]]) { float s[n]; s[0] = 1; a[0] = s[0]; }
