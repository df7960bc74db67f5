#include <metal_stdlib>
using namespace metal;
struct S { float v; float twice() const { return 2 * v; } };
kernel void k(device float* a [[buffer(0)]]) { S s; s.v = a[0]; a[1] = s.twice(); }
