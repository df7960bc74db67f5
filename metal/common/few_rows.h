// Products of a weight matrix with one to eight rows: the core of every projection of a decode step.
//
// Formula  y[m, n] = sum over chunks of 32 columns, of  s (sum q x) + b (sum x)   (affine, group >= 32)
//          y[m, n] = sum over chunks, of sum w x                                  (plain weights)
//          y[m, n] = sum over scale groups of 32 or 16 columns, of s (sum v x)    (mxfp4, mxfp8; nvfp4)
// Weights  [N, K] as codes.h has them, K a multiple of 32; scales and biases [N, K / group], group a power of
//          two of at least 32, for nvfp4 16.
// Launch   16 lanes take a weight row, a lane takes 32 columns per step: one 16-byte load of 4-bit codes, one
//          scale and one bias. A simdgroup holds 2 R rows, so that an input value in a register serves R.
// Input    staged once per threadgroup in threadgroup memory, multiplied by the power of two that belongs to
//          its code: codes are masked where they lie and never shifted. Sums of 32 inputs are staged too.
// Order    chunks ascending by lane, products of a chunk by fma in column order, lanes halved by xor 1, 2, 4,
//          8. Nothing of it depends on the number of rows M, the tile, R, or the threads of a threadgroup.
// Bound    the weight stream: (16 + 4) bytes issued per 18 stored, plus the input once per threadgroup.
#pragma once
#include "common/codes.h"

constant constexpr const uint kRowLanes = kOneRow ? 32u : 16u;
constant constexpr const uint kRowsAtOnce = 32u / kRowLanes;

// Columns of the input that are staged at a time, for M rows.
constexpr uint tile_columns(int m) { return m == 1 ? 2048u : m == 2 ? 1024u : 512u; }

// float4 of staged input: four columns of a chunk; chunks are neighbours, which keeps lanes on own banks.
constexpr uint staged_vectors(uint columns) { return 8u * (columns / 32u + 1u); }

// Weight rows per half of a simdgroup: 16 sums at most.
constexpr int row_block(int wanted, int m) { return kOneRow ? 1 : wanted * m > 16 ? 16 / m : wanted; }

// Stages one value; the 32 lanes of a simdgroup call it with the 32 columns of a chunk.
template <Format F>
inline void stage_value(float value, uint column, uint chunks, threadgroup float* staged,
                        threadgroup float* sums) {
    const uint chunk = column / kChunk;
    const uint at = column % kChunk;
    const float total = simd_sum(value);
    if (at == 0u) sums[chunk] = total;
    staged[((at / 4u) * (chunks + 1u) + chunk) * 4u + at % 4u] = value * code_weight<F>(column);
}

// acc[r * M + m] += weights of rows[r] times the staged columns [begin, begin + count) of input row m.
// `chunks` is the capacity of a staged row in chunks; `lane` is the lane in the simdgroup.
template <Format F, int R, int M>
inline void multiply_tile(device const uint* codes, device const Scale* scales, device const Scale* biases,
                          thread const uint* rows, uint cols, uint group_shift, uint begin, uint count,
                          uint chunks, threadgroup const float4* staged, threadgroup const float* sums,
                          uint lane, thread float* acc) {
    constexpr int kWords = piece_words(F);
    constexpr int kSteps = piece_steps(F);
    constexpr int kScales = chunk_scales(F);
    constexpr int kHalf = kScales == 2 ? 4 : 8;  // steps that share a scale
    const uint row_chunks = cols / kChunk;
    const uint row_groups = cols >> group_shift;
    for (uint c = lane % kRowLanes; c < count / kChunk; c += kRowLanes) {
        const uint column = begin + c * kChunk;
        float scale[R * 2];
        float bias[R];
#pragma clang loop unroll(full)
        for (int r = 0; r < R; ++r) {
            if (kScales == 0) continue;
            const uint group = rows[r] * row_groups + (column >> group_shift);
#pragma clang loop unroll(full)
            for (int s = 0; s < kScales; ++s) scale[r * 2 + s] = scale_value<F>(scales[group + uint(s)]);
            if (is_affine(F)) bias[r] = float(biases[group]);
        }
        float part[R * M];
#pragma clang loop unroll(full)
        for (int i = 0; i < R * M; ++i) part[i] = 0.0f;
#pragma clang loop unroll(full)
        for (int p = 0; p < chunk_pieces(F); ++p) {
            uint words[R * kWords];
#pragma clang loop unroll(full)
            for (int r = 0; r < R; ++r) {
                const uint at = (rows[r] * row_chunks + column / kChunk) * chunk_words(F);
                load_piece<F>(codes + at, p, words + r * kWords);
            }
#pragma clang loop unroll(full)
            for (int i = 0; i < kSteps; ++i) {
                const int step = p * kSteps + i;
                float4 x[M];
#pragma clang loop unroll(full)
                for (int m = 0; m < M; ++m) {
                    x[m] = staged[(uint(m) * 8u + uint(step)) * (chunks + 1u) + c];
                }
#pragma clang loop unroll(full)
                for (int r = 0; r < R; ++r) {
                    const float4 q = decode<F>(words + r * kWords, i);
#pragma clang loop unroll(full)
                    for (int m = 0; m < M; ++m) {
                        const int at = r * M + m;
                        const float low = fma(q.y, x[m].y, fma(q.x, x[m].x, part[at]));
                        part[at] = fma(q.w, x[m].w, fma(q.z, x[m].z, low));
                        if (kScales > 0 && (step + 1) % kHalf == 0) {
                            acc[at] = fma(scale[r * 2 + step / kHalf], part[at], acc[at]);
                            part[at] = 0.0f;
                        }
                    }
                }
            }
        }
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float total = is_affine(F) ? sums[uint(m) * chunks + c] : 0.0f;
#pragma clang loop unroll(full)
            for (int r = 0; r < R; ++r) {
                const int at = r * M + m;
                if (is_affine(F)) acc[at] = fma(bias[r], total, acc[at]);
                if (is_plain(F)) acc[at] = acc[at] + part[at];
            }
        }
    }
}

// The sum over the lanes of a row, in all of them.
inline float sum_row(float value) {
    value = value + simd_shuffle_xor(value, ushort(1));
    value = value + simd_shuffle_xor(value, ushort(2));
    value = value + simd_shuffle_xor(value, ushort(4));
    value = value + simd_shuffle_xor(value, ushort(8));
    return kRowLanes == 32u ? value + simd_shuffle_xor(value, ushort(16)) : value;
}

// Stages columns [begin, begin + count) of M rows times `gain` and adds their squares, by all threads of a
// threadgroup. Rows from `rows` on are zero. `sources` are the rows of the input.
template <Format F, int M>
inline void stage_gained(device const float* input, device const float* gain, thread const uint* sources,
                         uint rows, uint cols, uint begin, uint count, uint chunks, uint index, uint threads,
                         threadgroup float* staged, threadgroup float* sums, thread float* squares) {
    for (uint j = index; j < count; j += threads) {
        const float g = gain[begin + j];
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float x = uint(m) < rows ? input[sources[m] * cols + begin + j] : 0.0f;
            squares[m] = fma(x, x, squares[m]);
            stage_value<F>(x * g, j, chunks, staged + uint(m) * 32u * (chunks + 1u), sums + uint(m) * chunks);
        }
    }
}

// 1 / sqrt(mean + eps) of M rows from the squares that each thread has; `partial` has 32 M floats.
template <int M>
inline void inverse_rms(thread const float* squares, float cols, float eps, uint simdgroup, uint simdgroups,
                        uint lane, threadgroup float* partial, thread float* inverse) {
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        const float total = simd_sum(squares[m]);
        if (lane == 0u) partial[uint(m) * 32u + simdgroup] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (int m = 0; m < M; ++m) {
        float total = 0.0f;
        for (uint s = 0u; s < simdgroups; ++s) total += partial[uint(m) * 32u + s];
        inverse[m] = 1.0f / sqrt(total / cols + eps);
    }
}
