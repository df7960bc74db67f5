#include <metal_stdlib>
using namespace metal;
kernel void k(device ulong* a [[buffer(0)]]) { a[0] = 1ull << 40; }
