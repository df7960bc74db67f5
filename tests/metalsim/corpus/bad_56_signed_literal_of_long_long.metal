#include <metal_stdlib>
using namespace metal;
kernel void k(device long* a [[buffer(0)]]) { a[0] = a[1] & 0xffLL; }
