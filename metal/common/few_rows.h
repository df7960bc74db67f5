// Products of a weight matrix with one to eight rows: the core of every projection of a decode step.
//
// Formula  y[m, n] = sum over chunks of 32 columns, of  s (sum q x) + b (sum x)   (affine, group >= 32)
//          y[m, n] = sum over chunks of sum w x                                   (bf16 weights, BITS = 16)
// Weights  codes [N, K] little-end first, 4 or 8 bits, rows of 16-byte multiples (K a multiple of 32);
//          scales and biases [N, K / group]; group a power of two of at least 32.
// Launch   16 lanes take a weight row, a lane takes 32 columns per step: one 16-byte load of 4-bit codes, one
//          scale and one bias. A simdgroup holds 2 R rows, so that an input value in a register serves R.
// Input    staged once per threadgroup in threadgroup memory, multiplied by the power of two that belongs to
//          its nibble: codes are masked where they lie and never shifted. Sums of 32 inputs are staged too.
// Order    chunks ascending by lane, products of a chunk by fma in column order, lanes halved by xor 1, 2, 4,
//          8. Nothing of it depends on the number of rows M, the tile, R, or the threads of a threadgroup.
// Bound    the weight stream: (16 + 4) bytes issued per 18 stored, plus the input once per threadgroup.
#pragma once
#include "common/numbers.h"

constant constexpr const uint kChunk = 32u;
constant constexpr const uint kRowLanes = 16u;

// Columns of the input that are staged at a time, for M rows.
constexpr uint tile_columns(int m) { return m == 1 ? 2048u : m == 2 ? 1024u : 512u; }

// float4 of staged input: four columns of a chunk; chunks are neighbours, which keeps lanes on own banks.
constexpr uint staged_vectors(uint columns) { return 8u * (columns / 32u + 1u); }

// Weight rows per half of a simdgroup: 16 sums at most.
constexpr int row_block(int wanted, int m) { return wanted * m > 16 ? 16 / m : wanted; }

// 2^-(position of the code in its 16 bits)
template <int BITS>
inline float code_weight(uint column) {
    if (BITS == 4) return as_type<float>((127u - 4u * (column % 4u)) << 23);
    if (BITS == 8) return as_type<float>((127u - 8u * (column % 2u)) << 23);
    return 1.0f;
}

// Stages one value; the 32 lanes of a simdgroup call it with the 32 columns of a chunk.
template <int BITS>
inline void stage_value(float value, uint column, uint chunks, threadgroup float* staged,
                        threadgroup float* sums) {
    const uint chunk = column / kChunk;
    const uint at = column % kChunk;
    const float total = simd_sum(value);
    if (at == 0u) sums[chunk] = total;
    staged[((at / 4u) * (chunks + 1u) + chunk) * 4u + at % 4u] = value * code_weight<BITS>(column);
}

// Codes 4 i .. 4 i + 3 of a chunk, each times the power of two where it lies.
template <int BITS>
inline float4 decode(thread const uint4* words, int i) {
    if (BITS == 4) {
        const ushort2 pair = as_type<ushort2>(words[0][i / 2]);
        const ushort w = i % 2 == 0 ? pair.x : pair.y;
        return float4(float(ushort(w & 0x000f)), float(ushort(w & 0x00f0)), float(ushort(w & 0x0f00)),
                      float(ushort(w & 0xf000)));
    }
    if (BITS == 8) {
        const ushort2 pair = as_type<ushort2>(words[i / 4][i % 4]);
        return float4(float(ushort(pair.x & 0x00ff)), float(ushort(pair.x & 0xff00)),
                      float(ushort(pair.y & 0x00ff)), float(ushort(pair.y & 0xff00)));
    }
    const uint a = words[i / 2][i % 2 * 2];
    const uint b = words[i / 2][i % 2 * 2 + 1];
    return float4(as_type<float>(a << 16), as_type<float>(a & 0xffff0000u), as_type<float>(b << 16),
                  as_type<float>(b & 0xffff0000u));
}

// acc[r * M + m] += weights of rows[r] times the staged columns [begin, begin + count) of input row m.
// `chunks` is the capacity of a staged row in chunks; `lane` is the lane in the simdgroup.
template <int BITS, int R, int M>
inline void multiply_tile(device const uint4* codes, device const Scale* scales, device const Scale* biases,
                          thread const uint* rows, uint cols, uint group_shift, uint begin, uint count,
                          uint chunks, threadgroup const float4* staged, threadgroup const float* sums,
                          uint lane, thread float* acc) {
    constexpr int kVectors = BITS / 4;  // 16-byte loads per chunk
    const uint row_vectors = cols / kChunk * uint(kVectors);
    const uint row_groups = cols >> group_shift;
    for (uint c = lane % kRowLanes; c < count / kChunk; c += kRowLanes) {
        const uint column = begin + c * kChunk;
        uint4 words[R * kVectors];
        float scale[R];
        float bias[R];
#pragma clang loop unroll(full)
        for (int r = 0; r < R; ++r) {
            device const uint4* row = codes + rows[r] * row_vectors + column / kChunk * uint(kVectors);
#pragma clang loop unroll(full)
            for (int v = 0; v < kVectors; ++v) words[r * kVectors + v] = row[v];
            if (BITS < 16) {
                const uint group = rows[r] * row_groups + (column >> group_shift);
                scale[r] = float(scales[group]);
                bias[r] = float(biases[group]);
            }
        }
        float part[R * M];
#pragma clang loop unroll(full)
        for (int i = 0; i < R * M; ++i) part[i] = 0.0f;
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
            float4 x[M];
#pragma clang loop unroll(full)
            for (int m = 0; m < M; ++m) x[m] = staged[(uint(m) * 8u + uint(i)) * (chunks + 1u) + c];
#pragma clang loop unroll(full)
            for (int r = 0; r < R; ++r) {
                const float4 q = decode<BITS>(words + r * kVectors, i);
#pragma clang loop unroll(full)
                for (int m = 0; m < M; ++m) {
                    const float low = fma(q.y, x[m].y, fma(q.x, x[m].x, part[r * M + m]));
                    part[r * M + m] = fma(q.w, x[m].w, fma(q.z, x[m].z, low));
                }
            }
        }
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float total = BITS < 16 ? sums[uint(m) * chunks + c] : 0.0f;
#pragma clang loop unroll(full)
            for (int r = 0; r < R; ++r) {
                const int at = r * M + m;
                if (BITS < 16) {
                    acc[at] = fma(bias[r], total, fma(scale[r], part[at], acc[at]));
                } else {
                    acc[at] = acc[at] + part[at];
                }
            }
        }
    }
}

// The sum over the 16 lanes of a row, in all of them.
inline float sum_row(float value) {
    value = value + simd_shuffle_xor(value, ushort(1));
    value = value + simd_shuffle_xor(value, ushort(2));
    value = value + simd_shuffle_xor(value, ushort(4));
    return value + simd_shuffle_xor(value, ushort(8));
}

// Stages columns [begin, begin + count) of M rows times `gain` and adds their squares, by all threads of a
// threadgroup. Rows from `rows` on are zero. `sources` are the rows of the input.
template <int BITS, int M>
inline void stage_gained(device const float* input, device const float* gain, thread const uint* sources,
                         uint rows, uint cols, uint begin, uint count, uint chunks, uint index, uint threads,
                         threadgroup float* staged, threadgroup float* sums, thread float* squares) {
    for (uint j = index; j < count; j += threads) {
        const float g = gain[begin + j];
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            const float x = uint(m) < rows ? input[sources[m] * cols + begin + j] : 0.0f;
            squares[m] = fma(x, x, squares[m]);
            stage_value<BITS>(x * g, j, chunks, staged + uint(m) * 32u * (chunks + 1u),
                              sums + uint(m) * chunks);
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
