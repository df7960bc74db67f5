// The ends of a decode step: embedding, head with greedy choice.
//
// embed   residual[m] = row tokens[m] of the table, fp32.
//         Launch: (ceil(hidden / 1024), rows) threadgroups of 32 threads; a thread takes 32 columns.
// head    hidden[m] = x / sqrt(mean(x^2) + eps) * gain of row sources[m];  logits[m, n] = W hidden[m], fp32;
//         logits are written only if asked for. Each threadgroup leaves its best (order key, token) per row.
//         Launch: ceil(N / (16 R')) threadgroups of 256 threads, R' = 4, 4, 4, 2 for M = 1, 2, 4, 8; partials
//         [M rows, threadgroups]. The first threadgroup writes `hidden`.
// argmax  tokens[m] = the best of a row's partials, the lowest token among equals, NaN above all (its key is
//         0xffffffff: the host refuses such a token); then positions[m] += advance.
//         Launch: rows threadgroups of 256 threads.
// Bound: reading the head's weights once (17 % of a token's bytes at a vocabulary of 248,320).
#include "common/few_rows.h"

struct EmbedShape {
    uint rows;
    uint hidden;
    uint group_shift;
};

struct HeadShape {
    uint rows;
    uint cols;
    uint outputs;
    uint group_shift;
    float eps;
    uint write_logits;
    uint groups;  // threadgroups of the launch
};

template <Format F>
[[kernel]] void embed(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                      device const Scale* biases [[buffer(2)]], device const uint* tokens [[buffer(3)]],
                      device float* residual [[buffer(4)]], constant EmbedShape& shape [[buffer(5)]],
                      uint3 position [[thread_position_in_grid]]) {
    constexpr int kWords = piece_words(F);
    constexpr int kScales = chunk_scales(F);
    const uint column = position.x * kChunk;
    if (column >= shape.hidden) return;
    const ulong token = ulong(tokens[position.y]);
    device const uint* chunk =
        codes + (token * ulong(shape.hidden / kChunk) + ulong(position.x)) * ulong(chunk_words(F));
    float scale[2] = {1.0f, 1.0f};
    float bias = 0.0f;
    const ulong group = token * ulong(shape.hidden >> shape.group_shift) + ulong(column >> shape.group_shift);
#pragma clang loop unroll(full)
    for (int s = 0; s < kScales; ++s) scale[s] = scale_value<F>(scales[group + ulong(s)]);
    if (kScales == 1) scale[1] = scale[0];
    if (is_affine(F)) bias = float(biases[group]);
    device float4* out = (device float4*)(residual + position.y * shape.hidden + column);
#pragma clang loop unroll(full)
    for (int p = 0; p < chunk_pieces(F); ++p) {
        uint words[kWords];
        load_piece<F>(chunk, p, words);
#pragma clang loop unroll(full)
        for (int i = 0; i < piece_steps(F); ++i) {
            const float4 q = decode<F>(words, i);
            const float s = scale[(p * piece_steps(F) + i) / 4];
            out[p * piece_steps(F) + i] =
                float4(fma(s, q.x * code_weight<F>(0u), bias), fma(s, q.y * code_weight<F>(1u), bias),
                       fma(s, q.z * code_weight<F>(2u), bias), fma(s, q.w * code_weight<F>(3u), bias));
        }
    }
}

template <Format F, int M, int WANTED>
[[kernel]] void head(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                     device const Scale* biases [[buffer(2)]], device const float* input [[buffer(3)]],
                     device const float* gain [[buffer(4)]], device const uint* sources [[buffer(5)]],
                     device float* logits [[buffer(6)]], device float* hidden [[buffer(7)]],
                     device uint2* best [[buffer(8)]], constant HeadShape& shape [[buffer(9)]],
                     uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
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
    threadgroup uint2 candidates[kPartials];
    const uint first =
        (group * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) rows[r] = min(first + uint(r), shape.outputs - 1u);
    uint source[M];
    float squares[M];
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        source[m] = uint(m) < shape.rows ? sources[m] : 0u;
        squares[m] = 0.0f;
    }
    float acc[R * M];
#pragma clang loop unroll(full)
    for (int i = 0; i < R * M; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.cols; begin += kTile) {
        const uint count = min(kTile, shape.cols - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        stage_gained<F, M>(input, gain, source, shape.rows, shape.cols, begin, count, kTile / kChunk, index,
                           threads, (threadgroup float*)staged, sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, R, M>(codes, scales, biases, rows, shape.cols, shape.group_shift, begin, count,
                               kTile / kChunk, staged, sums, lane, acc);
    }
    float inverse[M];
    inverse_rms<M>(squares, float(shape.cols), shape.eps, simdgroup, threads / 32u, lane, partial, inverse);
    const uint simdgroups = threads / 32u;
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        uint key = 0u;
        uint token = 0xffffffffu;
#pragma clang loop unroll(full)
        for (int r = 0; r < R; ++r) {
            const float logit = sum_row(acc[r * M + m]) * inverse[m];
            const uint row = first + uint(r);
            if (row < shape.outputs) {
                const uint candidate = order_key(logit);
                if (candidate > key) {
                    key = candidate;
                    token = row;
                }
                if (shape.write_logits != 0u && uint(m) < shape.rows && lane % kRowLanes == uint(r)) {
                    logits[uint(m) * shape.outputs + row] = logit;
                }
            }
        }
        const uint top = simd_max(key);
        token = simd_min(key == top ? token : 0xffffffffu);
        if (lane == 0u) candidates[uint(m) * simdgroups + simdgroup] = uint2(top, token);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < shape.rows) {
        uint2 winner = candidates[index * simdgroups];
        for (uint s = 1u; s < simdgroups; ++s) {
            const uint2 other = candidates[index * simdgroups + s];
            if (other.x > winner.x) winner = other;
        }
        best[index * shape.groups + group] = winner;
    }
    if (group == 0u) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            if (uint(m) >= shape.rows) break;
            for (uint k = index; k < shape.cols; k += threads) {
                hidden[source[m] * shape.cols + k] = input[source[m] * shape.cols + k] * inverse[m] * gain[k];
            }
        }
    }
}

[[kernel]] void argmax(device const uint2* best [[buffer(0)]], device uint* tokens [[buffer(1)]],
                       device uint* keys [[buffer(2)]], device uint* positions [[buffer(3)]],
                       constant uint& groups [[buffer(4)]], constant uint& advance [[buffer(5)]],
                       uint row [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint2 candidates[32];
    uint key = 0u;
    uint token = 0xffffffffu;
    for (uint i = index; i < groups; i += threads) {
        const uint2 other = best[row * groups + i];
        if (other.x > key || (other.x == key && other.y < token)) {
            key = other.x;
            token = other.y;
        }
    }
    uint top = simd_max(key);
    token = simd_min(key == top ? token : 0xffffffffu);
    if (lane == 0u) candidates[simdgroup] = uint2(top, token);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0u) {
        const bool present = lane < threads / 32u;
        const uint2 mine = candidates[present ? lane : 0u];
        top = simd_max(mine.x);
        token = simd_min(mine.x == top ? mine.y : 0xffffffffu);
        if (lane == 0u) {
            tokens[row] = token;
            keys[row] = top;
            positions[row] = positions[row] + advance;
        }
    }
}

#define LILY_HEAD(format, rows)                                   \
    template [[host_name("head_" #format "_m" #rows)]] [[kernel]] \
    decltype(head<Format::format, rows, 4>) head<Format::format, rows, 4>;
#define LILY_EMBED(format)                              \
    template [[host_name("embed_" #format)]] [[kernel]] \
    decltype(embed<Format::format>) embed<Format::format>;
#define LILY_ENDS(format) \
    LILY_EMBED(format)    \
    LILY_HEAD(format, 1)  \
    LILY_HEAD(format, 2)  \
    LILY_HEAD(format, 4)  \
    LILY_HEAD(format, 8)

LILY_EACH_FORMAT(LILY_ENDS)
