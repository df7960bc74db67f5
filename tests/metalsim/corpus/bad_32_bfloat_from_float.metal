#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* a [[buffer(0)]], device float* b [[buffer(1)]]) { a[0] = b[0]; }
