// Sum of n floats: each threadgroup writes a partial sum, the last one to finish adds them up.
#include <metal_stdlib>
using namespace metal;

#ifdef __METALSIM__
#define ORDERED_COUNTER(counter) metalsim_ordered_counter(counter)
#else
#define ORDERED_COUNTER(counter)
#endif

// The variants of the same kernel, some of them wrong.
constant bool annotated [[function_constant(0)]];
constant bool barrier_before [[function_constant(1)]];
constant bool barrier_after [[function_constant(2)]];

kernel void last_block_sum(device const float* in [[buffer(0)]], device float* partial [[buffer(1)]],
                           device atomic_uint* counter [[buffer(2)]], device float* out [[buffer(3)]],
                           uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                           uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                           uint n [[threads_per_grid]]) {
    threadgroup uint is_last;
    // Two threads write partial sums, so that the counter's thread is not the only writer.
    float s = simd_sum(in[i]);
    if (t % 32 == 0) partial[group * 2 + t / 32] = s;
    if (barrier_before) threadgroup_barrier(mem_flags::mem_device);
    if (t == 0) {
        uint before = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
        if (annotated) ORDERED_COUNTER(counter);
        is_last = before == groups - 1;
    }
    if (barrier_after)
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    else
        threadgroup_barrier(mem_flags::mem_threadgroup);
    if (is_last && t < 32) {
        float v = 0;
        for (uint k = t; k < 2 * groups; k += 32) v += partial[k];
        v = simd_sum(v);
        if (t == 0) out[0] = v;
    }
}

#if __METAL_VERSION__ >= 320
kernel void fenced_sum(device const float* in [[buffer(0)]], device float* partial [[buffer(1)]],
                       device atomic_uint* counter [[buffer(2)]], device float* out [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                       uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    float s = simd_sum(in[i]);
    if (t == 0) {
        partial[group] = s;
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        uint before = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        if (before == groups - 1) {
            float v = 0;
            for (uint k = 0; k < groups; k++) v += partial[k];
            out[0] = v;
        }
    }
}
#endif
