// The pieces that project.metal does in one launch, each as its own: for comparison, and where the formats of
// weights allow no other. The norm before them is norm_rows of matrix_simdgroup.metal.
//
// project           out[m, n] = W x_m, for activations. project_float: the same with fp32 outputs (router).
//                   Launch: ceil(N / 32) threadgroups of 256 threads.
// swiglu            out[row, slot, i] = silu(gate[row, slot, i]) * up[row, slot, i]; a slot is an expert, and
//                   one in a dense layer; of many rows too, whose gate and up differ in format.
//                   Launch: (ceil(width / 256), slots, rows) threadgroups of 256 threads.
// add_rows          residual[i] += x[i]. Launch: one thread for each of `count`, any threadgroups.
// Bound: reading W once; for the others reading their rows, and a launch each.
#include "common/few_rows.h"

struct ProductShape {
    uint rows;         // valid rows, at most M
    uint cols;         // K
    uint outputs;      // N
    uint out_stride;   // of `out`, in elements
    uint group_shift;  // log2 of the quantisation group
};

struct GateShape {
    uint width;        // of a slot
    uint slot_stride;  // of gate, up and out, in elements
    uint row_stride;
};

template <typename Out, Format F, int M, int WANTED>
[[kernel]] void project(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                        device const Scale* biases [[buffer(2)]],
                        device const Activation* input [[buffer(3)]], device Out* out [[buffer(4)]],
                        constant ProductShape& shape [[buffer(5)]],
                        uint group [[threadgroup_position_in_grid]],
                        uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = row_block(WANTED, M);
    constexpr uint kTile = tile_columns(M);
    constexpr uint kVectors = staged_vectors(kTile) * uint(M);
    constexpr uint kSums = kTile / 32u * uint(M);
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
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
#pragma clang loop unroll(full)
            for (int m = 0; m < M; ++m) {
                const float x = uint(m) < shape.rows ? float(input[uint(m) * shape.cols + begin + j]) : 0.0f;
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
                out[uint(m) * shape.out_stride + row] = Out(total);
            }
        }
    }
}

[[kernel]] void swiglu(device const Activation* gate [[buffer(0)]], device const Activation* up [[buffer(1)]],
                       device Activation* out [[buffer(2)]], constant GateShape& shape [[buffer(3)]],
                       uint3 position [[thread_position_in_grid]]) {
    if (position.x >= shape.width) return;
    const uint i = position.z * shape.row_stride + position.y * shape.slot_stride + position.x;
    out[i] = Activation(silu(float(gate[i])) * float(up[i]));
}

[[kernel]] void add_rows(device const Activation* x [[buffer(0)]], device float* residual [[buffer(1)]],
                         constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i < count) residual[i] = residual[i] + float(x[i]);
}

#define LILY_PROJECT(format, rows)                                   \
    template [[host_name("project_" #format "_m" #rows)]] [[kernel]] \
    decltype(project<Activation, Format::format, rows, 2>) project<Activation, Format::format, rows, 2>;
#define LILY_PROJECT_FLOAT(format, rows)                                   \
    template [[host_name("project_float_" #format "_m" #rows)]] [[kernel]] \
    decltype(project<float, Format::format, rows, 4>) project<float, Format::format, rows, 4>;
#define LILY_PROJECTS(format)     \
    LILY_PROJECT(format, 1)       \
    LILY_PROJECT(format, 2)       \
    LILY_PROJECT(format, 4)       \
    LILY_PROJECT(format, 8)       \
    LILY_PROJECT_FLOAT(format, 1) \
    LILY_PROJECT_FLOAT(format, 2) \
    LILY_PROJECT_FLOAT(format, 4) \
    LILY_PROJECT_FLOAT(format, 8)

LILY_EACH_FORMAT(LILY_PROJECTS)
