// What a draft head (MTP) adds to the kernels of the trunk.
//
// norm_rows       out[m] = x_m / sqrt(mean(x_m^2) + eps) * gain, fp32: the hidden rows of a step whose logits
//                 nobody wants; `head` leaves the same bits for the rows that it is asked for.
//                 Launch: rows threadgroups of 256 threads.
// combine_hidden  out[m] = W [normed embedding_m ; normed hidden], both normed as above, gains of their own;
//                 the hidden row of m is sources[m]. Each half of the columns is a sum of its own, which
//                 the inverse of its norm multiplies at the end. W [N, 2 K], K = cols; out fp32.
//                 Launch: ceil(N / 32) threadgroups of 256 threads.
// Bound: reading W once.
#include "common/few_rows.h"

struct NormShape {
    uint cols;
    float eps;
};

struct CombineShape {
    uint rows;         // valid rows, at most M
    uint cols;         // K: columns of a half
    uint outputs;      // N
    uint out_stride;   // of `out`, in elements
    uint group_shift;  // log2 of the quantisation group
    float eps;
};

[[kernel]] void norm_rows(device const float* input [[buffer(0)]], device const float* gain [[buffer(1)]],
                          device float* out [[buffer(2)]], constant NormShape& shape [[buffer(3)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint index [[thread_index_in_threadgroup]],
                          uint threads [[threads_per_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float partial[32];
    device const float* x = input + row * shape.cols;
    float squares[1] = {0.0f};
    for (uint k = index; k < shape.cols; k += threads) squares[0] = fma(x[k], x[k], squares[0]);
    float inverse[1];
    inverse_rms<1>(squares, float(shape.cols), shape.eps, simdgroup, threads / 32u, lane, partial, inverse);
    for (uint k = index; k < shape.cols; k += threads) {
        out[row * shape.cols + k] = x[k] * inverse[0] * gain[k];
    }
}

// total[i] += (weights times the staged half of the input) / root mean square of the half's rows.
template <Format F, int R, int M>
inline void add_half(device const uint* codes, device const Scale* scales, device const Scale* biases,
                     device const float* input, device const float* gain, thread const uint* sources,
                     thread const uint* rows, constant CombineShape& shape, uint side, uint index,
                     uint threads, uint simdgroup, uint lane, threadgroup float4* staged,
                     threadgroup float* sums, threadgroup float* partial, thread float* total) {
    constexpr uint kTile = tile_columns(M);
    float squares[M];
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) squares[m] = 0.0f;
    float acc[R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.cols; begin += kTile) {
        const uint count = min(kTile, shape.cols - begin);
        if (begin > 0u || side > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_gained<F, M>(input, gain, sources, shape.rows, shape.cols, begin, count, kTile / kChunk, index,
                           threads, (threadgroup float*)staged, sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, R, M>(codes, scales, biases, rows, 2u * shape.cols, shape.group_shift,
                               side * shape.cols + begin, count, kTile / kChunk, staged, sums, lane, acc);
    }
    float inverse[M];
    inverse_rms<M>(squares, float(shape.cols), shape.eps, simdgroup, threads / 32u, lane, partial, inverse);
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) total[i] = fma(sum_row(acc[i]), inverse[i % M], total[i]);
}

template <Format F, int M, int WANTED>
[[kernel]] void combine_hidden(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const float* embedding [[buffer(3)]],
    device const float* embedding_norm [[buffer(4)]], device const float* hidden [[buffer(5)]],
    device const float* hidden_norm [[buffer(6)]], device const uint* sources [[buffer(7)]],
    device float* out [[buffer(8)]], constant CombineShape& shape [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
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
    uint own[M];
    uint source[M];
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        own[m] = uint(m);
        source[m] = uint(m) < shape.rows ? sources[m] : 0u;
    }
    float total[R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) total[i] = 0.0f;
    add_half<F, R, M>(codes, scales, biases, embedding, embedding_norm, own, rows, shape, 0u, index, threads,
                      simdgroup, lane, staged, sums, partial, total);
    add_half<F, R, M>(codes, scales, biases, hidden, hidden_norm, source, rows, shape, 1u, index, threads,
                      simdgroup, lane, staged, sums, partial, total);
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const uint row = first + uint(r);
            if (lane % kRowLanes == uint(r * M + m) && row < shape.outputs && uint(m) < shape.rows) {
                out[uint(m) * shape.out_stride + row] = total[r * M + m];
            }
        }
    }
}

#define LILY_COMBINE(format, rows)                                          \
    template [[host_name("combine_hidden_" #format "_m" #rows)]] [[kernel]] \
    decltype(combine_hidden<Format::format, rows, 2>) combine_hidden<Format::format, rows, 2>;
#define LILY_COMBINES(format) \
    LILY_COMBINE(format, 1)   \
    LILY_COMBINE(format, 2)   \
    LILY_COMBINE(format, 4)   \
    LILY_COMBINE(format, 8)

LILY_EACH_FORMAT(LILY_COMBINES)
