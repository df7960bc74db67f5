#include <metal_stdlib>
using namespace metal;
kernel void k(device int* a [[buffer(0)]], device uint* b [[buffer(1)]]) { a[0] = max(a[0], b[0]); }
