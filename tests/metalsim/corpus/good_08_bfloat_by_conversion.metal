#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* a [[buffer(0)]], device float* b [[buffer(1)]]) { float x = a[0]; a[1] = bfloat(x * float(a[2])); b[0] = a[3]; a[4] = static_cast<bfloat>(b[1]); }
