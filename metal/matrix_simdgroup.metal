// Products of weight matrices with many rows, by simdgroup matrices: the matrix path of M1 to M4.
//
// norm_rows         normed = x / sqrt(mean(x^2) + eps) * gain, and the inverse [rows] for route_rows.
//                   Launch: one threadgroup of 256 threads per row.
// project_rows      out[m, n] = W x_m, of row stride out_stride from its binding offset on.
// project_add_rows  residual[m, n] += W x_m.
// gate_up_rows      out[m, n] = silu(gate_n x_m) (up_n x_m); W = [gate; up], 2 N rows.
// route_rows        logits[m, n] = W (x_m gain) * inverse_m, all in fp32 like one row's, so that prefill and
//                   decode choose alike; row stride out_stride from its binding offset on.
// experts_up_rows   out[entry, n] = silu(gate_e x) (up_e x) for the blocks of routing.metal: rows are
//                   gathered through `entries`, the results lie in the order of the entries.
// experts_project_rows
//                   out[entry, n] = W_e x, the same rows and order: gate, or up, where their formats differ.
//                   swiglu of unfused_project.metal follows.
// experts_down_rows out[entries[entry], n] = down_e act[entry]: by row and slot again, for combine_rows.
// combine_rows      residual[m, n] += sum over slots of weight_slot down[m, slot, n], slots ascending.
//                   Launch: (ceil(hidden / 1024), rows) threadgroups of 256 threads, four columns a thread.
// A tile is T rows (kernels _t8, _t16, _t32, _t64) times 64 columns, 32 where T < 32 (project_rows and
// project_add_rows), 32 gate and 32 up (gate_up_rows, experts_up_rows).
// Launch: (ceil(N / columns), ceil(rows / T)) threadgroups of 128 threads; for experts the second is the
// capacity of the blocks, and blocks without rows leave at once. Rows of a block are multiplied in eights, so
// a block of 9 rows costs 16 whatever T is; T bounds registers and how often a weight is expanded.
//
// A step of 64 (or 128) columns: each thread expands 32 weights of a row into threadgroup memory, and copies
// its part of the input rows; the next step's bytes are loaded while the step is multiplied. A simdgroup
// has all rows of the tile and eight columns of each 32. Sums are fp32, along k in ascending order, so that
// a row's bits depend neither on T nor on the other rows. No expanded matrix exists outside of a tile.
// Weights up to 2^32 elements per matrix, K a multiple of 32; tiles are bf16 as activations are.
// Bound: multiply-adds of the matrix units; below 32 rows per matrix the weight stream.
#include "common/fragments.h"
#include "common/row_shapes.h"
#include "common/weight_tiles.h"

// What experts_rows makes of a product: its rows as they are, SwiGLU of its halves, or rows at other places.
enum class Result { store, gate, scatter };

constant constexpr const uint kThreads = 128u;
constant constexpr const uint kHalf = 32u;  // columns of the first half of a tile
#ifdef LILY_WHOLE_TILES
constant constexpr const bool kWhole = true;
#else
constant constexpr const bool kWhole = false;  // eights of a tile without rows are left out
#endif

// Columns of a step: a chunk for each thread if tiles are bf16, half as many if fp32.
template <typename Tile, int HALVES>
constexpr uint step_columns() {
    return (sizeof(Tile) == 4 ? 64u : 128u) / uint(HALVES);
}

// Elements of a tile row, with 16 bytes against bank conflicts.
template <typename Tile, int HALVES>
constexpr uint tile_stride() {
    return step_columns<Tile, HALVES>() + 16u / uint(sizeof(Tile));
}

// Vectors of four that a thread copies per step.
template <typename Tile, int ROWS, int HALVES>
constexpr int copies() {
    return (ROWS * int(step_columns<Tile, HALVES>()) / 4 + 127) / 128;
}

template <typename Tile, int ROWS, int HALVES>
constexpr uint input_elements() {
    return uint(ROWS) * tile_stride<Tile, HALVES>();
}

template <typename Tile, int HALVES>
constexpr uint weight_elements() {
    return kHalf * uint(HALVES) * tile_stride<Tile, HALVES>();
}

// Row of the tile that copy i of a thread is part of.
template <typename Tile, int HALVES>
inline uint copied_row(uint index, int i) {
    return (index + uint(i) * kThreads) / (step_columns<Tile, HALVES>() / 4u);
}

// Row of the weight tile that a thread expands.
template <typename Tile, int HALVES>
inline uint expanded_row(uint index) {
    return index / (step_columns<Tile, HALVES>() / kChunk);
}

template <int ROWS, int HALVES, bool GAINED, typename Source, typename Tile>
inline void load_rows(device const Source* input, device const float* gain, thread const uint* sources,
                      uint count, uint begin, uint cols, uint index, thread vec<Source, 4>* next) {
    constexpr uint kVectors = step_columns<Tile, HALVES>() / 4u;
#pragma clang loop unroll(full)
    for (int i = 0; i < copies<Tile, ROWS, HALVES>(); ++i) {
        const uint column = begin + (index + uint(i) * kThreads) % kVectors * 4u;
        next[i] = vec<Source, 4>(Source(0.0f));
        if (copied_row<Tile, HALVES>(index, i) < count && column < cols) {
            next[i] = *(device const vec<Source, 4>*)(input + sources[i] + column);
            if (GAINED) {
                next[i].x = Source(float(next[i].x) * gain[column]);
                next[i].y = Source(float(next[i].y) * gain[column + 1u]);
                next[i].z = Source(float(next[i].z) * gain[column + 2u]);
                next[i].w = Source(float(next[i].w) * gain[column + 3u]);
            }
        }
    }
}

// acc[i * HALVES + h] += rows 8 i .. of the input times columns 32 h + 8 simdgroup .. of the tile.
// sources[i]: element of the input where the row of copy i begins; weight_row: what this thread expands.
template <Format F, int ROWS, int HALVES, bool GAINED, typename Source, typename Tile>
inline void multiply_rows(device const uint* codes, device const Scale* scales, device const Scale* biases,
                          uint weight_row, uint cols, uint group_shift, device const Source* input,
                          device const float* gain, thread const uint* sources, uint count,
                          threadgroup Tile* rows, threadgroup Tile* weights, uint index, uint simdgroup,
                          uint lane, thread Fragment* acc) {
    constexpr uint kStep = step_columns<Tile, HALVES>();
    constexpr uint kStride = tile_stride<Tile, HALVES>();
    constexpr int kCopies = copies<Tile, ROWS, HALVES>();
    constexpr uint kStepChunks = kStep / kChunk;
    constexpr uint kExpanders = kHalf * uint(HALVES) * kStepChunks;
    const uint row = fragment_row(lane);
    const uint column = fragment_column(lane);
    const uint chunk = index % kStepChunks * kChunk;
    vec<Source, 4> next[kCopies];
    uint words[chunk_words(F)];
    float scales_bias[3];
#pragma clang loop unroll(full)
    for (int i = 0; i < ROWS / 8 * HALVES; ++i) acc[i] = fragment(0.0f, 0.0f);
    load_rows<ROWS, HALVES, GAINED, Source, Tile>(input, gain, sources, count, 0u, cols, index, next);
    load_chunk<F>(codes, scales, biases, weight_row, chunk, cols, group_shift, words, scales_bias);
    for (uint begin = 0u; begin < cols; begin += kStep) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (int i = 0; i < kCopies; ++i) {
            const uint at = copied_row<Tile, HALVES>(index, i);
            if (at < uint(ROWS)) {
                threadgroup Tile* target =
                    rows + at * kStride + (index + uint(i) * kThreads) % (kStep / 4u) * 4u;
                *(threadgroup vec<Tile, 4>*)target =
                    vec<Tile, 4>(Tile(float(next[i].x)), Tile(float(next[i].y)), Tile(float(next[i].z)),
                                 Tile(float(next[i].w)));
            }
        }
        if (index < kExpanders) {
            expand_chunk<F, Tile>(words, scales_bias,
                                  weights + expanded_row<Tile, HALVES>(index) * kStride + chunk);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (begin + kStep < cols) {
            load_rows<ROWS, HALVES, GAINED, Source, Tile>(input, gain, sources, count, begin + kStep, cols,
                                                          index, next);
            load_chunk<F>(codes, scales, biases, weight_row, begin + kStep + chunk, cols, group_shift, words,
                          scales_bias);
        }
        const uint end = min(kStep, cols - begin);
#pragma clang loop unroll_count(2)
        for (uint k = 0u; k < end; k += 8u) {
            Fragment w[HALVES];
#pragma clang loop unroll(full)
            for (int h = 0; h < HALVES; ++h) {
                threadgroup const Tile* at =
                    weights + (uint(h) * kHalf + 8u * simdgroup + column) * kStride + k + row;
                w[h] = fragment(float(at[0]), float(at[kStride]));
            }
#pragma clang loop unroll(full)
            for (int i = 0; i < ROWS / 8; ++i) {
                if (kWhole || 8u * uint(i) < count) {
                    threadgroup const Tile* at = rows + (8u * uint(i) + row) * kStride + k + column;
                    const Fragment x = fragment(float(at[0]), float(at[1]));
#pragma clang loop unroll(full)
                    for (int h = 0; h < HALVES; ++h) {
                        simdgroup_multiply_accumulate(acc[i * HALVES + h], x, w[h], acc[i * HALVES + h]);
                    }
                }
            }
        }
    }
}

[[kernel]] void norm_rows(device const float* input [[buffer(0)]], device const float* gain [[buffer(1)]],
                          device Activation* normed [[buffer(2)]], device float* inverses [[buffer(3)]],
                          constant RowsShape& shape [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                          uint index [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float partial[8];
    device const float* x = input + row * shape.cols;
    float squares = 0.0f;
    for (uint k = index; k < shape.cols; k += 256u) squares = fma(x[k], x[k], squares);
    squares = simd_sum(squares);
    if (lane == 0u) partial[simdgroup] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (uint i = 0u; i < 8u; ++i) total += partial[i];
    const float inverse = 1.0f / sqrt(total / float(shape.cols) + shape.eps);
    for (uint k = index; k < shape.cols; k += 256u) {
        normed[row * shape.cols + k] = Activation(x[k] * inverse * gain[k]);
    }
    if (index == 0u) inverses[row] = inverse;
}

template <Format F, int ROWS, int HALVES, bool ADD, typename Out>
inline void project_tile(device const uint* codes, device const Scale* scales, device const Scale* biases,
                         device const Activation* input, device Out* out, constant RowsShape& shape,
                         threadgroup Activation* rows, threadgroup Activation* weights, uint3 group,
                         uint index, uint simdgroup, uint lane) {
    const uint first = group.x * kHalf * uint(HALVES);
    const uint first_row = group.y * uint(ROWS);
    const uint count = min(uint(ROWS), shape.rows - first_row);
    uint sources[copies<Activation, ROWS, HALVES>()];
#pragma clang loop unroll(full)
    for (int i = 0; i < copies<Activation, ROWS, HALVES>(); ++i) {
        sources[i] = (first_row + copied_row<Activation, HALVES>(index, i)) * shape.cols;
    }
    const uint weight_row = min(first + expanded_row<Activation, HALVES>(index), shape.outputs - 1u);
    Fragment acc[ROWS / 8 * HALVES];
    multiply_rows<F, ROWS, HALVES, false, Activation, Activation>(
        codes, scales, biases, weight_row, shape.cols, shape.group_shift, input, (device const float*)nullptr,
        sources, count, rows, weights, index, simdgroup, lane, acc);
#pragma clang loop unroll(full)
    for (int i = 0; i < ROWS / 8; ++i) {
        const uint m = 8u * uint(i) + fragment_row(lane);
#pragma clang loop unroll(full)
        for (int h = 0; h < HALVES; ++h) {
            const float2 y = fragment_values(acc[i * HALVES + h]);
            const uint n = first + kHalf * uint(h) + 8u * simdgroup + fragment_column(lane);
            device Out* target = out + (first_row + m) * shape.out_stride + n;
            if (m < count && n < shape.outputs) target[0] = Out(ADD ? float(target[0]) + y.x : y.x);
            if (m < count && n + 1u < shape.outputs) target[1] = Out(ADD ? float(target[1]) + y.y : y.y);
        }
    }
}

template <Format F, int ROWS, int HALVES>
[[kernel, max_total_threads_per_threadgroup(128)]] void project_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device Activation* out [[buffer(4)]], constant RowsShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements<Activation, ROWS, HALVES>() / 4u;
    constexpr uint kWeights = weight_elements<Activation, HALVES>() / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    project_tile<F, ROWS, HALVES, false, Activation>(codes, scales, biases, input, out, shape, rows, weights,
                                                     group, index, simdgroup, lane);
}

template <Format F, int ROWS, int HALVES>
[[kernel, max_total_threads_per_threadgroup(128)]] void project_add_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device float* residual [[buffer(4)]], constant RowsShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements<Activation, ROWS, HALVES>() / 4u;
    constexpr uint kWeights = weight_elements<Activation, HALVES>() / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    project_tile<F, ROWS, HALVES, true, float>(codes, scales, biases, input, residual, shape, rows, weights,
                                               group, index, simdgroup, lane);
}

// Row of W = [gate; up] that a thread expands: the first half of the tile is gate, the second up.
inline uint gate_up_row(uint first, uint index, uint width) {
    const uint row = expanded_row<Activation, 2>(index);
    const uint n = min(first + row % kHalf, width - 1u);
    return row < kHalf ? n : width + n;
}

template <int ROWS>
inline void store_gated(thread Fragment* acc, uint first, uint width, uint count, device Activation* out,
                        uint stride, uint simdgroup, uint lane) {
#pragma clang loop unroll(full)
    for (int i = 0; i < ROWS / 8; ++i) {
        const uint m = 8u * uint(i) + fragment_row(lane);
        const float2 gate = fragment_values(acc[2 * i]);
        const float2 up = fragment_values(acc[2 * i + 1]);
        const uint n = first + 8u * simdgroup + fragment_column(lane);
        device Activation* target = out + m * stride + n;
        if (m < count && n < width) target[0] = Activation(silu(gate.x) * up.x);
        if (m < count && n + 1u < width) target[1] = Activation(silu(gate.y) * up.y);
    }
}

template <Format F, int ROWS>
[[kernel, max_total_threads_per_threadgroup(128)]] void gate_up_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device Activation* out [[buffer(4)]], constant RowsShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements<Activation, ROWS, 2>() / 4u;
    constexpr uint kWeights = weight_elements<Activation, 2>() / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    const uint first = group.x * kHalf;
    const uint first_row = group.y * uint(ROWS);
    const uint count = min(uint(ROWS), shape.rows - first_row);
    uint sources[copies<Activation, ROWS, 2>()];
#pragma clang loop unroll(full)
    for (int i = 0; i < copies<Activation, ROWS, 2>(); ++i) {
        sources[i] = (first_row + copied_row<Activation, 2>(index, i)) * shape.cols;
    }
    Fragment acc[ROWS / 4];
    multiply_rows<F, ROWS, 2, false, Activation, Activation>(
        codes, scales, biases, gate_up_row(first, index, shape.outputs), shape.cols, shape.group_shift, input,
        (device const float*)nullptr, sources, count, rows, weights, index, simdgroup, lane, acc);
    store_gated<ROWS>(acc, first, shape.outputs, count, out + first_row * shape.out_stride, shape.out_stride,
                      simdgroup, lane);
}

template <Format F>
[[kernel, max_total_threads_per_threadgroup(128)]] void route_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const float* input [[buffer(3)]],
    device const float* gain [[buffer(4)]], device const float* inverses [[buffer(5)]],
    device float* logits [[buffer(6)]], constant RowsShape& shape [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr int kRows = 16;
    constexpr uint kInput = input_elements<float, 16, 2>() / 4u;
    constexpr uint kWeights = weight_elements<float, 2>() / 4u;
    threadgroup float4 row_vectors[kInput];
    threadgroup float4 weight_vectors[kWeights];
    threadgroup float* rows = (threadgroup float*)row_vectors;
    threadgroup float* weights = (threadgroup float*)weight_vectors;
    const uint first = group.x * 2u * kHalf;
    const uint first_row = group.y * uint(kRows);
    const uint count = min(uint(kRows), shape.rows - first_row);
    uint sources[copies<float, 16, 2>()];
#pragma clang loop unroll(full)
    for (int i = 0; i < copies<float, 16, 2>(); ++i) {
        sources[i] = (first_row + copied_row<float, 2>(index, i)) * shape.cols;
    }
    const uint weight_row = min(first + expanded_row<float, 2>(index), shape.outputs - 1u);
    Fragment acc[4];
    multiply_rows<F, kRows, 2, true, float, float>(codes, scales, biases, weight_row, shape.cols,
                                                   shape.group_shift, input, gain, sources, count, rows,
                                                   weights, index, simdgroup, lane, acc);
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
        const uint m = 8u * uint(i / 2) + fragment_row(lane);
        const float2 y = fragment_values(acc[i]);
        const uint n = first + kHalf * uint(i % 2) + 8u * simdgroup + fragment_column(lane);
        if (m < count) {
            const float inverse = inverses[first_row + m];
            device float* target = logits + (first_row + m) * shape.out_stride + n;
            if (n < shape.outputs) target[0] = y.x * inverse;
            if (n + 1u < shape.outputs) target[1] = y.y * inverse;
        }
    }
}

// experts_up_rows (gate), experts_project_rows (store) and experts_down_rows (scatter).
template <Format F, int ROWS, Result RESULT>
[[kernel, max_total_threads_per_threadgroup(128)]] void experts_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const uint* shared_codes [[buffer(3)]],
    device const Scale* shared_scales [[buffer(4)]], device const Scale* shared_biases [[buffer(5)]],
    device const Activation* input [[buffer(6)]], device const uint* entries [[buffer(7)]],
    device const uint4* blocks [[buffer(8)]], device Activation* out [[buffer(9)]],
    constant ExpertRowsShape& shape [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements<Activation, ROWS, 2>() / 4u;
    constexpr uint kWeights = weight_elements<Activation, 2>() / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    constexpr bool kGate = RESULT == Result::gate;
    constexpr bool kUp = RESULT != Result::scatter;
    const uint4 block = blocks[group.y];
    const bool is_shared = block.x == shape.experts;
    const uint width = is_shared ? shape.shared_width : shape.width;
    const uint outputs = kUp ? width : shape.hidden;
    const uint cols = kUp ? shape.hidden : width;
    const uint first = group.x * kHalf * (kGate ? 1u : 2u);
    if (!takes_block(block, shape) || first >= outputs) return;
    const uint group_shift = is_shared ? shape.shared_group_shift : shape.group_shift;
    const ulong skipped = is_shared ? 0ul : ulong(block.x) * ulong(kGate ? 2u * width : outputs);
    device const uint* w =
        (is_shared ? shared_codes : codes) + skipped * ulong(cols / kChunk * chunk_words(F));
    const ulong skipped_groups = skipped * ulong(cols >> group_shift);
    device const Scale* s = (is_shared ? shared_scales : scales) + skipped_groups;
    device const Scale* b = (is_shared ? shared_biases : biases) + skipped_groups;
    uint sources[copies<Activation, ROWS, 2>()];
#pragma clang loop unroll(full)
    for (int i = 0; i < copies<Activation, ROWS, 2>(); ++i) {
        const uint at = block.y + min(copied_row<Activation, 2>(index, i), block.z - 1u);
        sources[i] = kUp ? entries[at] / shape.slots * shape.hidden : at * shape.stride;
    }
    const uint weight_row = kGate ? gate_up_row(first, index, outputs)
                                  : min(first + expanded_row<Activation, 2>(index), outputs - 1u);
    Fragment acc[ROWS / 4];
    multiply_rows<F, ROWS, 2, false, Activation, Activation>(w, s, b, weight_row, cols, group_shift, input,
                                                             (device const float*)nullptr, sources, block.z,
                                                             rows, weights, index, simdgroup, lane, acc);
    if (kGate) {
        store_gated<ROWS>(acc, first, outputs, block.z, out + block.y * shape.stride, shape.stride, simdgroup,
                          lane);
        return;
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < ROWS / 8; ++i) {
        const uint m = 8u * uint(i) + fragment_row(lane);
        const uint entry = block.y + min(m, block.z - 1u);
        const ulong base =
            kUp ? ulong(entry) * ulong(shape.stride) : ulong(entries[entry]) * ulong(shape.hidden);
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            const float2 y = fragment_values(acc[2 * i + h]);
            const uint n = first + kHalf * uint(h) + 8u * simdgroup + fragment_column(lane);
            device Activation* target = out + base + n;
            if (m < block.z && n < outputs) target[0] = Activation(y.x);
            if (m < block.z && n + 1u < outputs) target[1] = Activation(y.y);
        }
    }
}

[[kernel]] void combine_rows(device const Activation* down [[buffer(0)]],
                             device const float* routing [[buffer(1)]], device float* residual [[buffer(2)]],
                             constant ExpertRowsShape& shape [[buffer(3)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint index [[thread_index_in_threadgroup]]) {
    const uint n = (group.x * 256u + index) * 4u;
    if (n >= shape.hidden) return;
    const uint row = group.y;
    device const float* weights = routing + row * (shape.top_k + shape.slots);
    device const vec<Activation, 4>* x =
        (device const vec<Activation, 4>*)(down + ulong(row * shape.slots) * ulong(shape.hidden) + n);
    device float4* target = (device float4*)(residual + row * shape.hidden + n);
    float4 sum = *target;
    for (uint slot = 0u; slot < shape.slots; ++slot) {
        const vec<Activation, 4> y = x[slot * (shape.hidden / 4u)];
        const float weight = weights[slot < shape.top_k ? slot : 2u * shape.top_k];
        sum = float4(fma(weight, float(y.x), sum.x), fma(weight, float(y.y), sum.y),
                     fma(weight, float(y.z), sum.z), fma(weight, float(y.w), sum.w));
    }
    *target = sum;
}

#define LILY_ROWS(name, format, rows, halves)                       \
    template [[host_name(#name "_" #format "_t" #rows)]] [[kernel]] \
    decltype(name<Format::format, rows, halves>) name<Format::format, rows, halves>;
#define LILY_PAIRS(name, format, rows)                              \
    template [[host_name(#name "_" #format "_t" #rows)]] [[kernel]] \
    decltype(name<Format::format, rows>) name<Format::format, rows>;
#define LILY_EXPERTS(name, format, rows, result)                                    \
    template [[host_name("experts_" #name "_rows_" #format "_t" #rows)]] [[kernel]] \
    decltype(experts_rows<Format::format, rows, Result::result>)                    \
        experts_rows<Format::format, rows, Result::result>;
#define LILY_TILES(format, rows, halves)              \
    LILY_ROWS(project_rows, format, rows, halves)     \
    LILY_ROWS(project_add_rows, format, rows, halves) \
    LILY_PAIRS(gate_up_rows, format, rows)            \
    LILY_EXPERTS(up, format, rows, gate)              \
    LILY_EXPERTS(project, format, rows, store)        \
    LILY_EXPERTS(down, format, rows, scatter)
#define LILY_ROUTE(format)                                   \
    template [[host_name("route_rows_" #format)]] [[kernel]] \
    decltype(route_rows<Format::format>) route_rows<Format::format>;
#define LILY_MATRIX(format)   \
    LILY_TILES(format, 8, 1)  \
    LILY_TILES(format, 16, 1) \
    LILY_TILES(format, 32, 2) \
    LILY_TILES(format, 64, 2) \
    LILY_ROUTE(format)

LILY_EACH_FORMAT(LILY_MATRIX)
