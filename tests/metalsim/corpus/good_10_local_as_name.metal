#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* a [[buffer(0)]]) { threadgroup atomic_uint local[4]; atomic_store_explicit(&local[0], 1u, memory_order_relaxed); uint global = atomic_load_explicit(&local[0], memory_order_relaxed); a[0] = global; }
