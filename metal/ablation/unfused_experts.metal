// The pieces of experts.metal, each a launch, for comparison.
//
// choose          routing [weights top_k | experts top_k | sigmoid of the shared gate] from router logits,
// once
//                 per row instead of in each threadgroup. Launch: rows threadgroups of one simdgroup.
// expert_product  out[row, slot] = W_e x for the slots of a row, W_e a part of the rows of an expert's stack:
// gate
//                 (first 0) or up (first `width`) of [experts, 2 width, K] on the one normed row (in_slot 0),
//                 or down of [experts, N, width] on each slot's own activation. Launch: (ceil(outputs / 32),
//                 slots, rows) threadgroups of 256 threads, for the larger outputs.
// weigh_slots     out[row, n] = sum over routed slots of weight_slot x[row, slot, n].
// add_shared      residual[row, n] += sigmoid of the shared gate * x[row, top_k, n].
//                 Launch: both (ceil(hidden / 256), rows) threadgroups of 256 threads.
// Between and after them: swiglu and add_rows of unfused_project.metal.
// Bound: reading the chosen experts once per row; for the others their rows, and a launch each.
#include "common/choose_experts.h"
#include "common/few_rows.h"

struct ChoiceShape {
    uint experts;
    uint top_k;
    uint normalize;
    uint shared;
};

struct ExpertProductShape {
    uint top_k;
    uint shared;      // 1 if there is a shared expert
    uint first_slot;  // slots of this launch begin here
    uint all_slots;   // top_k + shared
    uint height;      // weight rows of an expert in its stack
    uint first;       // those before the part
    uint outputs;     // those of the part
    uint cols;        // K
    uint shared_first;
    uint shared_outputs;
    uint shared_cols;
    uint in_row;    // elements between rows of the input
    uint in_slot;   // and between slots; 0: one for all
    uint out_slot;  // elements between slots of the output; its rows are all_slots of them
    uint group_shift;
    uint shared_group_shift;
};

struct SlotShape {
    uint top_k;
    uint shared;
    uint hidden;
};

[[kernel]] void choose(device const float* logits [[buffer(0)]], device float* routing [[buffer(1)]],
                       constant ChoiceShape& shape [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint chosen[kMaxTopK];
    threadgroup float weights[kMaxTopK];
    device const float* row_logits = logits + row * (shape.experts + shape.shared);
    choose_experts(row_logits, shape, lane, chosen, weights);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device float* target = routing + row * (2u * shape.top_k + shape.shared);
    if (lane < shape.top_k) {
        target[lane] = weights[lane];
        target[shape.top_k + lane] = float(chosen[lane]);
    }
    if (lane == 0u && shape.shared != 0u) target[2u * shape.top_k] = sigmoid(row_logits[shape.experts]);
}

template <Format F, int WANTED>
[[kernel]] void expert_product(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const uint* shared_codes [[buffer(3)]],
    device const Scale* shared_scales [[buffer(4)]], device const Scale* shared_biases [[buffer(5)]],
    device const Activation* input [[buffer(6)]], device const float* routing [[buffer(7)]],
    device Activation* out [[buffer(8)]], constant ExpertProductShape& shape [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint3 size [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = row_block(WANTED, 1);
    constexpr uint kTile = tile_columns(1);
    constexpr uint kVectors = staged_vectors(kTile);
    constexpr uint kSums = kTile / 32u;
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    const uint threads = size.x;
    const uint slot = shape.first_slot + group.y;
    const bool is_shared = slot == shape.top_k;
    device const float* route = routing + group.z * (2u * shape.top_k + shape.shared);
    const uint outputs = is_shared ? shape.shared_outputs : shape.outputs;
    const uint cols = is_shared ? shape.shared_cols : shape.cols;
    const uint group_shift = is_shared ? shape.shared_group_shift : shape.group_shift;
    const ulong skipped = is_shared ? ulong(shape.shared_first)
                                    : ulong(route[shape.top_k + slot]) * ulong(shape.height) + shape.first;
    device const uint* w =
        (is_shared ? shared_codes : codes) + skipped * ulong(cols / kChunk * chunk_words(F));
    const ulong skipped_groups = skipped * ulong(cols >> group_shift);
    device const Scale* s = (is_shared ? shared_scales : scales) + skipped_groups;
    device const Scale* b = (is_shared ? shared_biases : biases) + skipped_groups;
    device const Activation* x = input + group.z * shape.in_row + slot * shape.in_slot;
    const uint first =
        (group.x * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) rows[r] = min(first + uint(r), outputs - 1u);
    float acc[R];
#pragma clang loop unroll(full)
    for (int i = 0; i < R; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < cols; begin += kTile) {
        const uint count = min(kTile, cols - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint j = index; j < count; j += threads) {
            stage_value<F>(float(x[begin + j]), j, kTile / kChunk, (threadgroup float*)staged, sums);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, R, 1>(w, s, b, rows, cols, group_shift, begin, count, kTile / kChunk, staged, sums,
                               lane, acc);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
        const float total = sum_row(acc[r]);
        const uint n = first + uint(r);
        if (lane % kRowLanes == uint(r) && n < outputs) {
            out[(group.z * shape.all_slots + slot) * shape.out_slot + n] = Activation(total);
        }
    }
}

[[kernel]] void weigh_slots(device const Activation* x [[buffer(0)]],
                            device const float* routing [[buffer(1)]], device Activation* out [[buffer(2)]],
                            constant SlotShape& shape [[buffer(3)]],
                            uint3 position [[thread_position_in_grid]]) {
    const uint n = position.x;
    const uint row = position.y;
    if (n >= shape.hidden) return;
    device const float* route = routing + row * (2u * shape.top_k + shape.shared);
    float total = 0.0f;
    for (uint slot = 0u; slot < shape.top_k; ++slot) {
        const uint at = (row * (shape.top_k + shape.shared) + slot) * shape.hidden + n;
        total = fma(route[slot], float(x[at]), total);
    }
    out[row * shape.hidden + n] = Activation(total);
}

[[kernel]] void add_shared(device const Activation* x [[buffer(0)]],
                           device const float* routing [[buffer(1)]], device float* residual [[buffer(2)]],
                           constant SlotShape& shape [[buffer(3)]],
                           uint3 position [[thread_position_in_grid]]) {
    const uint n = position.x;
    const uint row = position.y;
    if (n >= shape.hidden) return;
    const float gate = routing[row * (2u * shape.top_k + 1u) + 2u * shape.top_k];
    const float value = float(x[(row * (shape.top_k + 1u) + shape.top_k) * shape.hidden + n]);
    const uint at = row * shape.hidden + n;
    residual[at] = fma(gate, value, residual[at]);
}

#define LILY_EXPERT_PRODUCT(format)                              \
    template [[host_name("expert_product_" #format)]] [[kernel]] \
    decltype(expert_product<Format::format, 2>) expert_product<Format::format, 2>;
#define LILY_EXPERT_PRODUCTS(format) LILY_EXPERT_PRODUCT(format)

LILY_EACH_FORMAT(LILY_EXPERT_PRODUCTS)
