#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* a [[buffer(0)]]) { a[0] = exp(a[1]); }
