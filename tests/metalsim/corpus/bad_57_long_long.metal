#include <metal_stdlib>
using namespace metal;
kernel void k(device long* a [[buffer(0)]]) { long long b = a[1]; a[0] = b; }
