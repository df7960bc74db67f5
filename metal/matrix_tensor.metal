// Products of weight matrices with many rows by tensor operations (Metal 4): the matrix path of M5.
//
// project_rows, project_add_rows, gate_up_rows, experts_up_rows, experts_project_rows, experts_down_rows:
// formulas, bindings and structures of matrix_simdgroup.metal. Its norm_rows, route_rows and combine_rows
// serve both.
// A tile is T rows (kernels _t16, _t32, _t64) times 128 columns, 64 where T is 16; half of them gate and half
// up.
// Launch: (ceil(N / columns), ceil(rows / T)) threadgroups of 128 threads, 64 where T is 16; columns are 64
// and 32 for gate and up; for experts the second is the capacity of the blocks.
//
// Two forms of the product, a library each, since one that a system's headers lack would take all with it:
//   fragments          A simdgroup has 16 columns of each half and all rows, in 16x16 fragments of its
//                      registers, which it fills itself: rows from device memory, weights from the expanded
//                      tile. The halves are the two fragments of a 16x32x16 operation. Needs macOS 26.2,
//                      relies on the lane map.
//   LILY_TENSOR_TILES  The threadgroup's simdgroups share an operation over tiles of rows and weights in
//                      threadgroup memory, one per half; elements are found by get_multidimensional_index.
// The host chooses by a probe and by comparing a product with the other paths.
// Rows beyond the end repeat the last and are not stored. Sums are fp32; their order is the hardware's, so
// the paths agree within rounding, and a row's bits don't depend on T or the other rows within one.
// Bound: multiply-adds of the matrix units; below 32 rows per matrix the weight stream.
#include "common/row_shapes.h"
#include "common/tensor_fragments.h"
#include "common/weight_tiles.h"

enum class Result { store, add, gate, scatter };

// Rows of the input: first, first + 1, ..., or those of entries / divisor from `first` on.
struct RowSource {
    device const Activation* input;
    device const uint* entries;
    uint divisor;  // 0: not gathered
    uint stride;
    uint first;
    uint count;
};

// Rows of the weights: `first` on for the first half of a tile, `second` on for the other, up to the last
// ones.
struct WeightRows {
    uint first;
    uint second;
    uint last_first;
    uint last_second;
};

// Where results go: rows first_row on, or entries[0], entries[1], ... if scattered; columns `first` on.
struct RowTarget {
    device Activation* out;
    device float* residual;
    device const uint* entries;
    uint stride;
    uint first_row;
    uint count;
    uint first;
    uint outputs;
};

constant constexpr const uint kStep = sizeof(Activation) == 2 ? 64u : 32u;  // columns of a step
constant constexpr const uint kStride = kStep + 16u / uint(sizeof(Activation));
constant constexpr const uint kStepChunks = kStep / kChunk;

constexpr int simdgroups(int rows) { return rows == 16 ? 2 : 4; }
constexpr uint half_columns(int rows) { return 16u * uint(simdgroups(rows)); }
constexpr uint weight_elements(int rows) { return 2u * half_columns(rows) * kStride; }
#ifdef LILY_TENSOR_TILES
constexpr uint input_elements(int rows) { return uint(rows) * kStride; }
#else
constexpr uint input_elements(int) { return 4u; }
#endif

inline uint row_offset(thread const RowSource& source, uint m) {
    const uint at = source.first + min(m, source.count - 1u);
    return (source.divisor == 0u ? at : source.entries[at] / source.divisor) * source.stride;
}

template <Result RESULT, int ROWS>
inline void put(thread const RowTarget& target, uint m, uint n, float first, float second) {
    if (m >= target.count) return;
    const uint row = RESULT == Result::scatter ? target.entries[m] : target.first_row + m;
    const ulong base = ulong(row) * ulong(target.stride);
    const uint column = target.first + n;
    if (RESULT == Result::gate) {
        if (column < target.outputs) target.out[base + column] = Activation(silu(first) * second);
        return;
    }
#pragma clang loop unroll(full)
    for (uint h = 0u; h < 2u; ++h) {
        const uint at = column + h * half_columns(ROWS);
        if (at >= target.outputs) continue;
        const float value = h == 0u ? first : second;
        if (RESULT == Result::add) {
            target.residual[base + at] = target.residual[base + at] + value;
        } else {
            target.out[base + at] = Activation(value);
        }
    }
}

template <Format F, int ROWS>
inline void load_weights(device const uint* codes, device const Scale* scales, device const Scale* biases,
                         thread const WeightRows& rows, uint begin, uint cols, uint group_shift, uint index,
                         thread uint* words, thread float* scales_bias) {
    constexpr uint kThreads = 32u * uint(simdgroups(ROWS));
    constexpr uint kHalf = half_columns(ROWS);
#pragma clang loop unroll(full)
    for (uint i = 0u; i < kStepChunks; ++i) {
        const uint chunk = index + i * kThreads;
        const uint j = chunk / kStepChunks;
        const uint row =
            j < kHalf ? min(rows.first + j, rows.last_first) : min(rows.second + j - kHalf, rows.last_second);
        load_chunk<F>(codes, scales, biases, row, begin + chunk % kStepChunks * kChunk, cols, group_shift,
                      words + i * chunk_words(F), scales_bias + i * 3u);
    }
}

template <Format F, int ROWS>
inline void expand_weights(thread const uint* words, thread const float* scales_bias, uint index,
                           threadgroup Activation* weights) {
    constexpr uint kThreads = 32u * uint(simdgroups(ROWS));
#pragma clang loop unroll(full)
    for (uint i = 0u; i < kStepChunks; ++i) {
        const uint chunk = index + i * kThreads;
        expand_chunk<F, Activation>(words + i * chunk_words(F), scales_bias + i * 3u,
                                    weights + chunk / kStepChunks * kStride + chunk % kStepChunks * kChunk);
    }
}

#ifdef LILY_TENSOR_TILES

typedef tensor<threadgroup Activation, dextents<int32_t, 2>, tensor_inline> TileView;

template <Format F, int ROWS, Result RESULT>
inline void tensor_tile(device const uint* codes, device const Scale* scales, device const Scale* biases,
                        thread const WeightRows& weight_rows, uint cols, uint group_shift,
                        thread const RowSource& source, thread const RowTarget& target,
                        threadgroup Activation* rows, threadgroup Activation* weights, uint index, uint,
                        uint) {
    constexpr int kSimdgroups = simdgroups(ROWS);
    constexpr uint kThreads = 32u * uint(kSimdgroups);
    constexpr uint kHalf = half_columns(ROWS);
    constexpr uint kVectors = kStep / 4u;
    constexpr int kCopies = int(uint(ROWS) * kVectors / kThreads);
    constexpr auto descriptor = matmul2d_descriptor(ROWS, int(kHalf), int(kStep), false, true, kRelaxed,
                                                    matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroups<kSimdgroups>> op;
    TileView left(rows, dextents<int32_t, 2>(int(kStep), ROWS), array<int, 2>{1, int(kStride)});
    TileView first(weights, dextents<int32_t, 2>(int(kStep), int(kHalf)), array<int, 2>{1, int(kStride)});
    TileView second(weights + kHalf * kStride, dextents<int32_t, 2>(int(kStep), int(kHalf)),
                    array<int, 2>{1, int(kStride)});
    auto a = op.template get_destination_cooperative_tensor<TileView, TileView, float>();
    auto b = op.template get_destination_cooperative_tensor<TileView, TileView, float>();
#pragma clang loop unroll(full)
    for (ushort i = 0; i < a.get_capacity(); ++i) {
        a[i] = 0.0f;
        b[i] = 0.0f;
    }
    uint offsets[kCopies];
#pragma clang loop unroll(full)
    for (int i = 0; i < kCopies; ++i)
        offsets[i] = row_offset(source, (index + uint(i) * kThreads) / kVectors);
    uint words[kStepChunks * chunk_words(F)];
    float scales_bias[kStepChunks * 3u];
    load_weights<F, ROWS>(codes, scales, biases, weight_rows, 0u, cols, group_shift, index, words,
                          scales_bias);
    for (uint begin = 0u; begin < cols; begin += kStep) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        expand_weights<F, ROWS>(words, scales_bias, index, weights);
#pragma clang loop unroll(full)
        for (int i = 0; i < kCopies; ++i) {
            const uint at = index + uint(i) * kThreads;
            const uint column = at % kVectors * 4u;
            vec<Activation, 4> x = vec<Activation, 4>(Activation(0.0f));
            if (begin + column < cols) {
                x = *(device const vec<Activation, 4>*)(source.input + offsets[i] + begin + column);
            }
            *(threadgroup vec<Activation, 4>*)(rows + at / kVectors * kStride + column) = x;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (begin + kStep < cols) {
            load_weights<F, ROWS>(codes, scales, biases, weight_rows, begin + kStep, cols, group_shift, index,
                                  words, scales_bias);
        }
        op.run(left, first, a);
        op.run(left, second, b);
    }
#pragma clang loop unroll(full)
    for (ushort i = 0; i < a.get_capacity(); ++i) {
        const auto at = a.get_multidimensional_index(i);
        if (a.is_valid_element(i)) put<RESULT, ROWS>(target, uint(at[1]), uint(at[0]), a[i], b[i]);
    }
}

#else

template <Format F, int ROWS, Result RESULT>
inline void tensor_tile(device const uint* codes, device const Scale* scales, device const Scale* biases,
                        thread const WeightRows& weight_rows, uint cols, uint group_shift,
                        thread const RowSource& source, thread const RowTarget& target,
                        threadgroup Activation*, threadgroup Activation* weights, uint index, uint simdgroup,
                        uint lane) {
    constexpr int kFragments = ROWS / 16;
    constexpr uint kHalf = half_columns(ROWS);
    const uint row = tensor_row(lane);
    const uint column = tensor_column(lane);
    uint offsets[2 * kFragments];
    float sums[16 * kFragments];
#pragma clang loop unroll(full)
    for (int i = 0; i < 2 * kFragments; ++i) offsets[i] = row_offset(source, 8u * uint(i) + row) + column;
#pragma clang loop unroll(full)
    for (int i = 0; i < 16 * kFragments; ++i) sums[i] = 0.0f;
    uint words[kStepChunks * chunk_words(F)];
    float scales_bias[kStepChunks * 3u];
    load_weights<F, ROWS>(codes, scales, biases, weight_rows, 0u, cols, group_shift, index, words,
                          scales_bias);
    for (uint begin = 0u; begin < cols; begin += kStep) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        expand_weights<F, ROWS>(words, scales_bias, index, weights);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (begin + kStep < cols) {
            load_weights<F, ROWS>(codes, scales, biases, weight_rows, begin + kStep, cols, group_shift, index,
                                  words, scales_bias);
        }
        const uint end = min(kStep, cols - begin);
        for (uint k = 0u; k < end; k += 16u) {
            Activation b[16];
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                const uint j = uint(i / 2) * kHalf + 16u * simdgroup + row + 8u * uint(i % 2);
                take_four(*(threadgroup const vec<Activation, 4>*)(weights + j * kStride + k + column),
                          b + 4 * i);
            }
#pragma clang loop unroll(full)
            for (int f = 0; f < kFragments; ++f) {
                if (16u * uint(f) >= source.count) continue;
                Activation a[8];
#pragma clang loop unroll(full)
                for (int i = 0; i < 2; ++i) {
                    take_four(
                        *(device const vec<Activation, 4>*)(source.input + offsets[2 * f + i] + begin + k),
                        a + 4 * i);
                }
                multiply_fragments<true>(a, b, sums + 16 * f);
            }
        }
    }
#pragma clang loop unroll(full)
    for (int f = 0; f < kFragments; ++f) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 8; ++e) {
            put<RESULT, ROWS>(target, 16u * uint(f) + row + 8u * uint(e / 4),
                              16u * simdgroup + column + uint(e % 4), sums[16 * f + e], sums[16 * f + 8 + e]);
        }
    }
}

#endif

template <int ROWS, Result RESULT>
inline WeightRows rows_of_tile(uint group, uint outputs) {
    WeightRows rows;
    rows.first = group * half_columns(ROWS) * (RESULT == Result::gate ? 1u : 2u);
    rows.second = rows.first + (RESULT == Result::gate ? outputs : half_columns(ROWS));
    rows.last_first = outputs - 1u;
    rows.last_second = RESULT == Result::gate ? 2u * outputs - 1u : outputs - 1u;
    return rows;
}

template <Format F, int ROWS, Result RESULT>
inline void dense_tile(device const uint* codes, device const Scale* scales, device const Scale* biases,
                       device const Activation* input, device Activation* out, device float* residual,
                       constant RowsShape& shape, threadgroup Activation* rows,
                       threadgroup Activation* weights, uint3 group, uint index, uint simdgroup, uint lane) {
    const WeightRows weight_rows = rows_of_tile<ROWS, RESULT>(group.x, shape.outputs);
    const uint first_row = group.y * uint(ROWS);
    RowSource source;
    source.input = input;
    source.entries = (device const uint*)nullptr;
    source.divisor = 0u;
    source.stride = shape.cols;
    source.first = first_row;
    source.count = min(uint(ROWS), shape.rows - first_row);
    RowTarget target;
    target.out = out;
    target.residual = residual;
    target.entries = (device const uint*)nullptr;
    target.stride = shape.out_stride;
    target.first_row = first_row;
    target.count = source.count;
    target.first = weight_rows.first;
    target.outputs = shape.outputs;
    tensor_tile<F, ROWS, RESULT>(codes, scales, biases, weight_rows, shape.cols, shape.group_shift, source,
                                 target, rows, weights, index, simdgroup, lane);
}

template <Format F, int ROWS, Result RESULT>
[[kernel, max_total_threads_per_threadgroup(128)]] void project_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device Activation* out [[buffer(4)]], constant RowsShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements(ROWS) / 4u;
    constexpr uint kWeights = weight_elements(ROWS) / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    dense_tile<F, ROWS, RESULT>(codes, scales, biases, input, out, (device float*)nullptr, shape, rows,
                                weights, group, index, simdgroup, lane);
}

template <Format F, int ROWS>
[[kernel, max_total_threads_per_threadgroup(128)]] void project_add_rows(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const Activation* input [[buffer(3)]],
    device float* residual [[buffer(4)]], constant RowsShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kInput = input_elements(ROWS) / 4u;
    constexpr uint kWeights = weight_elements(ROWS) / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    dense_tile<F, ROWS, Result::add>(codes, scales, biases, input, (device Activation*)nullptr, residual,
                                     shape, rows, weights, group, index, simdgroup, lane);
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
    constexpr uint kInput = input_elements(ROWS) / 4u;
    constexpr uint kWeights = weight_elements(ROWS) / 4u;
    threadgroup vec<Activation, 4> row_vectors[kInput];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup Activation* rows = (threadgroup Activation*)row_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    constexpr bool kUp = RESULT != Result::scatter;
    const uint4 block = blocks[group.y];
    const bool is_shared = block.x == shape.experts;
    const uint width = is_shared ? shape.shared_width : shape.width;
    const uint outputs = kUp ? width : shape.hidden;
    const uint cols = kUp ? shape.hidden : width;
    const WeightRows weight_rows = rows_of_tile<ROWS, RESULT>(group.x, outputs);
    if (!takes_block(block, shape) || weight_rows.first >= outputs) return;
    const uint group_shift = is_shared ? shape.shared_group_shift : shape.group_shift;
    const ulong skipped =
        is_shared ? 0ul : ulong(block.x) * ulong(RESULT == Result::gate ? 2u * width : outputs);
    device const uint* w =
        (is_shared ? shared_codes : codes) + skipped * ulong(cols / kChunk * chunk_words(F));
    const ulong skipped_groups = skipped * ulong(cols >> group_shift);
    device const Scale* s = (is_shared ? shared_scales : scales) + skipped_groups;
    device const Scale* b = (is_shared ? shared_biases : biases) + skipped_groups;
    RowSource source;
    source.input = input;
    source.entries = entries;
    source.divisor = kUp ? shape.slots : 0u;
    source.stride = kUp ? shape.hidden : shape.stride;
    source.first = block.y;
    source.count = block.z;
    RowTarget target;
    target.out = out;
    target.residual = (device float*)nullptr;
    target.entries = entries + block.y;
    target.stride = kUp ? shape.stride : shape.hidden;
    target.first_row = block.y;
    target.count = block.z;
    target.first = weight_rows.first;
    target.outputs = outputs;
    tensor_tile<F, ROWS, RESULT>(w, s, b, weight_rows, cols, group_shift, source, target, rows, weights,
                                 index, simdgroup, lane);
}

#define LILY_TENSOR(name, format, rows, function, result)           \
    template [[host_name(#name "_" #format "_t" #rows)]] [[kernel]] \
    decltype(function<Format::format, rows, Result::result>) function<Format::format, rows, Result::result>;
#define LILY_TENSOR_ROWS(format, rows)                                        \
    LILY_TENSOR(project_rows, format, rows, project_rows, store)              \
    LILY_TENSOR(gate_up_rows, format, rows, project_rows, gate)               \
    LILY_TENSOR(experts_up_rows, format, rows, experts_rows, gate)            \
    LILY_TENSOR(experts_project_rows, format, rows, experts_rows, store)      \
    LILY_TENSOR(experts_down_rows, format, rows, experts_rows, scatter)       \
    template [[host_name("project_add_rows_" #format "_t" #rows)]] [[kernel]] \
    decltype(project_add_rows<Format::format, rows>) project_add_rows<Format::format, rows>;
#define LILY_TENSOR_FORMAT(format) \
    LILY_TENSOR_ROWS(format, 16)   \
    LILY_TENSOR_ROWS(format, 32)   \
    LILY_TENSOR_ROWS(format, 64)

LILY_EACH_FORMAT(LILY_TENSOR_FORMAT)
