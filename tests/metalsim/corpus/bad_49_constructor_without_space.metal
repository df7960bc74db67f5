#include <metal_stdlib>
using namespace metal;
struct S { float v; S(float x) : v(x) {} };
kernel void k(device float* a [[buffer(0)]]) { S s(a[0]); a[1] = s.v; }
