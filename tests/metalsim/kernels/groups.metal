// simdgroup and quadgroup functions, one result each, for comparison with NumPy.
#include <metal_stdlib>
using namespace metal;

kernel void reductions(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                       uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
    float v = in[i];
    out[i] = simd_sum(v);
    out[n + i] = simd_max(v);
    out[2 * n + i] = simd_min(v);
    out[3 * n + i] = simd_prefix_inclusive_sum(v);
    out[4 * n + i] = simd_prefix_exclusive_sum(v);
    out[5 * n + i] = quad_sum(v);
    out[6 * n + i] = quad_max(v);
    out[7 * n + i] = quad_min(v);
    out[8 * n + i] = quad_prefix_inclusive_sum(v);
    out[9 * n + i] = quad_prefix_exclusive_sum(v);
    out[10 * n + i] = simd_product(v);
    out[11 * n + i] = quad_product(v);
}

kernel void moves(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint n [[threads_per_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
    uint v = in[i];
    out[i] = simd_shuffle(v, ushort((lane * 7) % 32));
    out[n + i] = simd_shuffle_xor(v, 5);
    out[2 * n + i] = simd_broadcast(v, 9);
    out[3 * n + i] = simd_shuffle_rotate_down(v, 3);
    out[4 * n + i] = simd_shuffle_rotate_up(v, 3);
    out[5 * n + i] = simd_shuffle_and_fill_down(v, 99u, 4);
    out[6 * n + i] = simd_shuffle_and_fill_up(v, 99u, 4);
    out[7 * n + i] = quad_shuffle(v, ushort(3 - lane % 4));
    out[8 * n + i] = quad_shuffle_xor(v, 2);
    out[9 * n + i] = quad_broadcast(v, 1);
    out[10 * n + i] = quad_shuffle_down(v, 1);
    out[11 * n + i] = quad_shuffle_up(v, 1);
    out[12 * n + i] = simd_broadcast_first(v);
}

kernel void votes(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
    bool odd = in[i] & 1;
    out[i] = uint((simd_vote::vote_t)simd_ballot(odd));
    out[n + i] = simd_all(odd);
    out[2 * n + i] = simd_any(odd);
    out[3 * n + i] = simd_is_first();
    out[4 * n + i] = uint((quad_vote::vote_t)quad_ballot(odd));
    out[5 * n + i] = quad_all(odd);
    out[6 * n + i] = quad_any(odd);
    out[7 * n + i] = simd_or(in[i]);
    out[8 * n + i] = simd_xor(in[i]);
    out[9 * n + i] = simd_and(in[i]);
}

// Quads of one simdgroup take different paths, which is allowed: only the lanes of a quad must agree.
kernel void divergent_quads(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]],
                            uint quad [[quadgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_quadgroup]]) {
    float s = 0;
    for (uint k = 0; k <= quad; k++) s += quad_sum(float(lane));
    out[i] = s;
}

kernel void divergent_lanes(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]],
                            uint lane [[thread_index_in_quadgroup]]) {
    float s = 0;
    for (uint k = 0; k <= lane; k++) s += quad_sum(1.0f);
    out[i] = quad_max(s);
}

// C = A B^T for 8x8 tiles of half in threadgroup memory, by simdgroup matrices.
kernel void matrix_transposed(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                              device float* c [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup half ta[64];
    threadgroup half tb[64];
    for (uint i = lane; i < 64; i += 32) {
        ta[i] = a[i];
        tb[i] = b[i];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 ma, mb;
    simdgroup_load(ma, ta, 8);
    simdgroup_load(mb, tb, 8, ulong2(0, 0), true);
    simdgroup_float8x8 mc = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
    simdgroup_multiply_accumulate(mc, ma, mb, mc);
    simdgroup_store(mc, c, 8);
}

// The matrix is read while other lanes still write it: a load orders no memory.
kernel void matrix_without_barrier(device const half* a [[buffer(0)]], device float* c [[buffer(2)]],
                                   uint lane [[thread_index_in_simdgroup]]) {
    threadgroup half ta[64];
    ta[lane] = a[lane];
    ta[lane + 32] = a[lane + 32];
    simdgroup_half8x8 ma;
    simdgroup_load(ma, ta, 8);
    simdgroup_float8x8 mc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_multiply_accumulate(mc, ma, ma, mc);
    simdgroup_store(mc, c, 8);
}
