#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* a [[buffer(0)]]) { bfloat x = a[0] * a[1]; a[2] = x; }
