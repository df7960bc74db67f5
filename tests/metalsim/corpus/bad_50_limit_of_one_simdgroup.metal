#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(32)]] void k(device float* a [[buffer(0)]]) { a[0] = 1; }
