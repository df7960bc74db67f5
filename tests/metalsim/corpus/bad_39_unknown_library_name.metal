#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]]) { a[0] = metal::mad(a[0], a[1], a[2]); }
