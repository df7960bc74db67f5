#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* a [[buffer(0)]]) { float2 b = float2(a[0]); a[1].xy = b; }
