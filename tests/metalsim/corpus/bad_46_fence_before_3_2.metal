#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]]) { a[0] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); }
