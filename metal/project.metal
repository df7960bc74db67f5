// Projections of a decode step, for one to eight rows.
//
// norm_project  out[m, n] = W n_m,  n_m = x_m / sqrt(mean(x_m^2) + eps) * gain; the inverse is applied to the
//               sum, so that the norm costs no pass of its own. x fp32 [rows, K], out [rows, out_stride] from
//               its binding offset on: q|k|v and qkv|z|b|a are matrices with stacked rows.
//               Launch: ceil(N / (16 R')) threadgroups of 256 threads, R' = 4, 4, 4, 2 for M = 1, 2, 4, 8.
// norm_gate_up  out[m, n] = silu(gate_n n_m) * (up_n n_m); W = [gate; up], 2 N rows.
//               Launch: ceil(N / (16 R')) threadgroups of 256 threads, R' = 2, 2, 2, 1.
// project_add   residual[m, n] += W x_m.
//               Launch: ceil(N / (2 R' simdgroups)) threadgroups, R' = 2; 4 simdgroups for N = 2048.
// project_add_heads  the same with x_m divided by the root mean square of each head, from the sums of squares
//               that delta_rule leaves (squares [rows, heads, slices]): the second half of the gated norm.
// Bound: reading W once. The norm kernels have 256 threads always: the sum of squares depends on them.
#include "common/few_rows.h"

struct ProjectShape {
    uint rows;         // valid rows, at most M
    uint cols;         // K
    uint outputs;      // N
    uint out_stride;   // of `out`, in elements
    uint group_shift;  // log2 of the quantisation group
    float eps;
};

struct HeadNorm {
    uint heads;
    uint head_shift;  // log2 of the columns of a head
    uint slices;      // partial sums per head
    float eps;
};

constant constexpr const uint kMaxHeads = 64u;

template <Format F, int M, int WANTED>
[[kernel]] void norm_project(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                             device const Scale* biases [[buffer(2)]],
                             device const float* input [[buffer(3)]], device const float* gain [[buffer(4)]],
                             device Activation* out [[buffer(5)]], constant ProjectShape& shape [[buffer(6)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]],
                             uint threads [[threads_per_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = row_block(WANTED, M);
    constexpr uint kTile = tile_columns(M);
    constexpr uint kVectors = staged_vectors(kTile) * uint(M);
    constexpr uint kSums = kTile / 32u * uint(M);
    constexpr uint kPartials = 32u * uint(M);
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    threadgroup float partial[kPartials];
    const uint first =
        (group * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) rows[r] = min(first + uint(r), shape.outputs - 1u);
    uint sources[M];
    float squares[M];
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        sources[m] = uint(m);
        squares[m] = 0.0f;
    }
    float acc[R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.cols; begin += kTile) {
        const uint count = min(kTile, shape.cols - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_gained<F, M>(input, gain, sources, shape.rows, shape.cols, begin, count, kTile / kChunk, index,
                           threads, (threadgroup float*)staged, sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, R, M>(codes, scales, biases, rows, shape.cols, shape.group_shift, begin, count,
                               kTile / kChunk, staged, sums, lane, acc);
    }
    float inverse[M];
    inverse_rms<M>(squares, float(shape.cols), shape.eps, simdgroup, threads / 32u, lane, partial, inverse);
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float total = sum_row(acc[r * M + m]);
            const uint row = first + uint(r);
            if (lane % kRowLanes == uint(r * M + m) && row < shape.outputs && uint(m) < shape.rows) {
                out[uint(m) * shape.out_stride + row] = Activation(total * inverse[m]);
            }
        }
    }
}

template <Format F, int M, int WANTED>
[[kernel]] void norm_gate_up(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                             device const Scale* biases [[buffer(2)]],
                             device const float* input [[buffer(3)]], device const float* gain [[buffer(4)]],
                             device Activation* out [[buffer(5)]], constant ProjectShape& shape [[buffer(6)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]],
                             uint threads [[threads_per_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = kOneRow ? 1 : row_block(2 * WANTED, M) / 2;  // outputs; twice as many weight rows
    constexpr uint kTile = tile_columns(M);
    constexpr uint kVectors = staged_vectors(kTile) * uint(M);
    constexpr uint kSums = kTile / 32u * uint(M);
    constexpr uint kPartials = 32u * uint(M);
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    threadgroup float partial[kPartials];
    const uint first =
        (group * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[2 * R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
        rows[r] = min(first + uint(r), shape.outputs - 1u);
        rows[R + r] = shape.outputs + rows[r];
    }
    uint sources[M];
    float squares[M];
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        sources[m] = uint(m);
        squares[m] = 0.0f;
    }
    float acc[2 * R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < 2 * R * M; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.cols; begin += kTile) {
        const uint count = min(kTile, shape.cols - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_gained<F, M>(input, gain, sources, shape.rows, shape.cols, begin, count, kTile / kChunk, index,
                           threads, (threadgroup float*)staged, sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, 2 * R, M>(codes, scales, biases, rows, shape.cols, shape.group_shift, begin, count,
                                   kTile / kChunk, staged, sums, lane, acc);
    }
    float inverse[M];
    inverse_rms<M>(squares, float(shape.cols), shape.eps, simdgroup, threads / 32u, lane, partial, inverse);
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float gate = sum_row(acc[r * M + m]) * inverse[m];
            const float up = sum_row(acc[(R + r) * M + m]) * inverse[m];
            const uint row = first + uint(r);
            if (lane % kRowLanes == uint(r * M + m) && row < shape.outputs && uint(m) < shape.rows) {
                out[uint(m) * shape.out_stride + row] = Activation(silu(gate) * up);
            }
        }
    }
}

template <Format F, int M, int WANTED, bool HEADS>
inline void add_projection(device const uint* codes, device const Scale* scales, device const Scale* biases,
                           device const Activation* input, device float* residual,
                           constant ProjectShape& shape, threadgroup const float* inverse, uint head_shift,
                           threadgroup float4* staged, threadgroup float* sums, uint group, uint index,
                           uint threads, uint simdgroup, uint lane) {
    constexpr int R = row_block(WANTED, M);
    constexpr uint kTile = tile_columns(M);
    const uint first =
        (group * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) rows[r] = min(first + uint(r), shape.outputs - 1u);
    float acc[R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.cols; begin += kTile) {
        const uint count = min(kTile, shape.cols - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint j = index; j < count; j += threads) {
            const uint column = begin + j;
#pragma clang loop unroll(full)
            for (int m = 0; m < M; ++m) {
                float x = 0.0f;
                if (uint(m) < shape.rows) {
                    x = float(input[uint(m) * shape.cols + column]);
                    if (HEADS) x *= inverse[uint(m) * kMaxHeads + (column >> head_shift)];
                }
                stage_value<F>(x, j, kTile / kChunk,
                               (threadgroup float*)staged + uint(m) * 32u * (kTile / kChunk + 1u),
                               sums + uint(m) * (kTile / kChunk));
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, R, M>(codes, scales, biases, rows, shape.cols, shape.group_shift, begin, count,
                               kTile / kChunk, staged, sums, lane, acc);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float total = sum_row(acc[r * M + m]);
            const uint row = first + uint(r);
            if (lane % kRowLanes == uint(r * M + m) && row < shape.outputs && uint(m) < shape.rows) {
                const uint at = uint(m) * shape.outputs + row;
                residual[at] = residual[at] + total;
            }
        }
    }
}

template <Format F, int M, int WANTED>
[[kernel]] void project_add(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                            device const Scale* biases [[buffer(2)]],
                            device const Activation* input [[buffer(3)]],
                            device float* residual [[buffer(4)]], constant ProjectShape& shape [[buffer(5)]],
                            uint group [[threadgroup_position_in_grid]],
                            uint index [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kVectors = staged_vectors(tile_columns(M)) * uint(M);
    constexpr uint kSums = tile_columns(M) / 32u * uint(M);
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    add_projection<F, M, WANTED, false>(codes, scales, biases, input, residual, shape, sums, 0u, staged, sums,
                                        group, index, threads, simdgroup, lane);
}

template <Format F, int M, int WANTED>
[[kernel]] void project_add_heads(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device float* residual [[buffer(4)]], constant ProjectShape& shape [[buffer(5)]],
    device const float* squares [[buffer(6)]], constant HeadNorm& norm [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kVectors = staged_vectors(tile_columns(M)) * uint(M);
    constexpr uint kSums = tile_columns(M) / 32u * uint(M);
    constexpr uint kInverses = kMaxHeads * uint(M);
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    threadgroup float inverse[kInverses];
    for (uint i = index; i < shape.rows * norm.heads; i += threads) {
        float total = 0.0f;
        for (uint s = 0u; s < norm.slices; ++s) total += squares[i * norm.slices + s];
        const float mean = total / float(1u << norm.head_shift);
        inverse[i / norm.heads * kMaxHeads + i % norm.heads] = 1.0f / sqrt(mean + norm.eps);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_projection<F, M, WANTED, true>(codes, scales, biases, input, residual, shape, inverse,
                                       norm.head_shift, staged, sums, group, index, threads, simdgroup, lane);
}

#define LILY_PROJECTION(name, format, rows, wanted)                 \
    template [[host_name(#name "_" #format "_m" #rows)]] [[kernel]] \
    decltype(name<Format::format, rows, wanted>) name<Format::format, rows, wanted>;
#define LILY_PROJECTION_ROWS(name, format, wanted) \
    LILY_PROJECTION(name, format, 1, wanted)       \
    LILY_PROJECTION(name, format, 2, wanted)       \
    LILY_PROJECTION(name, format, 4, wanted)       \
    LILY_PROJECTION(name, format, 8, wanted)
#define LILY_PROJECTIONS(format)                  \
    LILY_PROJECTION_ROWS(norm_project, format, 4) \
    LILY_PROJECTION_ROWS(norm_gate_up, format, 2) \
    LILY_PROJECTION_ROWS(project_add, format, 2)  \
    LILY_PROJECTION_ROWS(project_add_heads, format, 2)

LILY_EACH_FORMAT(LILY_PROJECTIONS)
