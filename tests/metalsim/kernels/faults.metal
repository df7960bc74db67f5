// One planted fault per kernel; the kernels named clean_* are their correct counterparts.
#include <metal_stdlib>
using namespace metal;

kernel void missing_barrier(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                            uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = in[t];
    out[t] = s[63 - t];
}

kernel void wrong_flags(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                        uint t [[thread_index_in_threadgroup]]) {
    out[t] = in[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float v = out[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    out[t] = v;
}

kernel void clean_flags(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                        uint t [[thread_index_in_threadgroup]]) {
    out[t] = in[t];
    threadgroup_barrier(mem_flags::mem_device);
    float v = out[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    out[t] = v;
}

kernel void past_the_end(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                         constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i <= n) out[i] = in[i + 25];
}

kernel void threadgroup_overrun(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                                threadgroup float* s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
    s[t + 1] = in[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = s[t + 1];
}

kernel void uninitialised_threadgroup(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    if (t < 60) s[t] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = s[t];
}

kernel void early_return(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t > 50) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = t;
}

kernel void two_barriers(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 32)
        threadgroup_barrier(mem_flags::mem_threadgroup);
    else
        threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = t;
}

kernel void divergent_simd(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
    float s = 0;
    for (uint i = 0; i <= lane % 3; i++) s += simd_sum(1.0f);
    out[t] = simd_max(s);
}

kernel void inactive_lane(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t % 32 == 31) return;
    out[t] = simd_shuffle_down(float(t), 1);
}

kernel void between_groups(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t == 0) out[0] += 1.0f;
}

kernel void simd_exchange(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    s[t] = t;
    out[t] = s[t ^ 1];
}

kernel void simd_exchange_none(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    s[t] = t;
    simdgroup_barrier(mem_flags::mem_none);
    out[t] = s[t ^ 1];
}

kernel void clean_simd_exchange(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    s[t] = t;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = s[t ^ 1];
}

kernel void misaligned_vector(device const uchar* in [[buffer(0)]], device uint* out [[buffer(1)]],
                              constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    uint4 v = *(device const uint4*)(in + n + i * 16);
    out[i] = v.x;
}

kernel void local_array(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                        constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    uint a[4] = {in[i], 1, 2, 3};
    out[i] = a[n];
}

kernel void wide_shift(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                       constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    out[i] = in[i] << n;
}

kernel void zero_division(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                          constant int& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    out[i] = in[i] / n;
}

kernel void too_much_memory(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float a[8000];
    threadgroup float b[200];
    a[t] = t;
    b[t] = t;
    out[t] = a[t] + b[t];
}

kernel void mixed_atomic(device atomic_uint* counter [[buffer(0)]], device uint* plain [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
    if (i == 0)
        plain[0] = 1;
    else
        atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
}

kernel void clean_axpy(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
    out[i] = in[i] * 2.0f + 1.0f;
}

kernel void clean_exchange(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                           uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[256];
    float v = in[i];
    for (int k = 0; k < 2; k++) {
        s[t] = v;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        v = s[t ^ 1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    out[i] = v;
}

// 1,500 barriers: more than the checker's epoch counter holds.
kernel void clean_many_barriers(device float* out [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = t;
    for (int k = 0; k < 1500; k++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float v = s[t ^ 1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s[t] = v;
    }
    out[t] = s[t];
}

kernel void wild_index(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                       constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    const ulong far = ulong(n) * 1000003ul;
    out[i + far] = in[i];
}
