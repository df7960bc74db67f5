// Mixture of experts of a decode step: three launches, three stages.
//
// route         normed = x / sqrt(mean(x^2) + eps) * gain;  logits = W normed, fp32, the shared expert's gate
//               being the last row of W [experts + 1, K].
//               Launch: ceil((experts + 1) / (16 R')) threadgroups of 256 threads, R' = 1; the first one
//               writes `normed`. Router and gate of different formats are launches of their own.
// experts_up    the top_k experts of a row by logit (lower number first among equals), then per slot
//               out[slot] = silu(gate_e x) * (up_e x); the shared expert is slot top_k. Every threadgroup
//               picks the experts again: 256 logits are 1 KiB, a launch of its own would be a stage. The
//               first writes routing [weights top_k | experts top_k | sigmoid of the shared gate].
//               Weights [experts, 2 width, K], gate above up.
//               Launch: (ceil(width / 32), slots, rows) threadgroups of 256 threads.
// experts_down  residual[n] += sum over slots of weight_slot (down_e act_slot)_n, slots ascending, the shared
//               expert last: one product with K' = slots * width columns whose rows change with the slot, the
//               weights folded into the staged input. Weights [experts, N, width].
//               Launch: (ceil(N / (4 simdgroups)), 1, rows), 4 simdgroups.
// A launch takes slots [first_slot, first_slot + slots): if the shared expert has other bits than the routed
// ones, it is a launch of its own. Rows are independent: a row's bits don't depend on the others.
// Bound: reading the chosen experts once per row.
#include "common/choose_experts.h"
#include "common/few_rows.h"

struct RouteShape {
    uint rows;
    uint cols;     // K
    uint outputs;  // experts, and one if there is a shared expert
    uint out_stride;
    uint group_shift;
    float eps;
    uint write_normed;  // 0: another launch does, for weights of another format
};

struct ExpertShape {
    uint experts;
    uint top_k;
    uint normalize;   // routing weights of the chosen experts sum to 1
    uint shared;      // 1 if there is a shared expert
    uint first_slot;  // slots of this launch
    uint slots;
    uint width;  // of a routed expert
    uint shared_width;
    uint stride;     // max(width, shared_width): of a slot in the activation
    uint all_slots;  // top_k + shared: a row of the activation is all_slots * stride
    uint hidden;     // K of up, N of down
    uint group_shift;
    uint shared_group_shift;
};

constant constexpr const uint kDownColumns = 4608u;  // staged activation: nine slots of 512

template <Format F, int M, int WANTED>
[[kernel]] void route(device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
                      device const Scale* biases [[buffer(2)]], device const float* input [[buffer(3)]],
                      device const float* gain [[buffer(4)]], device float* logits [[buffer(5)]],
                      device Activation* normed [[buffer(6)]], constant RouteShape& shape [[buffer(7)]],
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
                logits[uint(m) * shape.out_stride + row] = total * inverse[m];
            }
        }
    }
    if (group == 0u && shape.write_normed != 0u) {
#pragma clang loop unroll(full)
        for (int m = 0; m < M; ++m) {
            if (uint(m) >= shape.rows) break;
            for (uint k = index; k < shape.cols; k += threads) {
                const uint at = uint(m) * shape.cols + k;
                normed[at] = Activation(input[at] * inverse[m] * gain[k]);
            }
        }
    }
}

template <Format F, int WANTED>
[[kernel]] void experts_up(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const uint* shared_codes [[buffer(3)]],
    device const Scale* shared_scales [[buffer(4)]], device const Scale* shared_biases [[buffer(5)]],
    device const Activation* normed [[buffer(6)]], device const float* logits [[buffer(7)]],
    device Activation* out [[buffer(8)]], device float* routing [[buffer(9)]],
    constant ExpertShape& shape [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = row_block(WANTED, 1);
    constexpr uint kTile = tile_columns(1);
    constexpr uint kVectors = staged_vectors(kTile);
    constexpr uint kSums = kTile / 32u;
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    threadgroup uint chosen[kMaxTopK];
    threadgroup float weights[kMaxTopK];
    const uint threads = size.x;
    const uint row = group.z;
    const uint slot = shape.first_slot + group.y;
    const bool is_shared = slot == shape.top_k;
    device const float* row_logits = logits + row * (shape.experts + shape.shared);
    if (simdgroup == 0u) choose_experts(row_logits, shape, lane, chosen, weights);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group.x == 0u && group.y == 0u && shape.first_slot == 0u) {
        device float* target = routing + row * (2u * shape.top_k + shape.shared);
        if (index < shape.top_k) {
            target[index] = weights[index];
            target[shape.top_k + index] = float(chosen[index]);
        }
        if (index == 0u && shape.shared != 0u) {
            target[2u * shape.top_k] = sigmoid(row_logits[shape.experts]);
        }
    }
    const uint width = is_shared ? shape.shared_width : shape.width;
    const uint group_shift = is_shared ? shape.shared_group_shift : shape.group_shift;
    const ulong expert = is_shared ? 0ul : ulong(chosen[slot]);
    const ulong skipped = expert * ulong(2u * width);  // weight rows before this expert
    device const uint* w =
        (is_shared ? shared_codes : codes) + skipped * ulong(shape.hidden / kChunk * chunk_words(F));
    const ulong skipped_groups = skipped * ulong(shape.hidden >> group_shift);
    device const Scale* s = (is_shared ? shared_scales : scales) + skipped_groups;
    device const Scale* b = (is_shared ? shared_biases : biases) + skipped_groups;
    const uint first =
        (group.x * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[2 * R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
        rows[r] = min(first + uint(r), width - 1u);
        rows[R + r] = width + rows[r];
    }
    float acc[2 * R];
#pragma clang loop unroll(full)
    for (int i = 0; i < 2 * R; ++i) acc[i] = 0.0f;
    for (uint begin = 0u; begin < shape.hidden; begin += kTile) {
        const uint count = min(kTile, shape.hidden - begin);
        if (begin > 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint j = index; j < count; j += threads) {
            stage_value<F>(float(normed[row * shape.hidden + begin + j]), j, kTile / kChunk,
                           (threadgroup float*)staged, sums);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<F, 2 * R, 1>(w, s, b, rows, shape.hidden, group_shift, begin, count, kTile / kChunk,
                                   staged, sums, lane, acc);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
        const float gate = sum_row(acc[r]);
        const float up = sum_row(acc[R + r]);
        const uint column = first + uint(r);
        if (lane % kRowLanes == uint(r) && column < width) {
            out[(row * shape.all_slots + slot) * shape.stride + column] = Activation(silu(gate) * up);
        }
    }
}

template <Format F, int WANTED>
[[kernel]] void experts_down(
    device const uint* codes [[buffer(0)]], device const Scale* scales [[buffer(1)]],
    device const Scale* biases [[buffer(2)]], device const uint* shared_codes [[buffer(3)]],
    device const Scale* shared_scales [[buffer(4)]], device const Scale* shared_biases [[buffer(5)]],
    device const Activation* input [[buffer(6)]], device const float* routing [[buffer(7)]],
    device float* residual [[buffer(8)]], constant ExpertShape& shape [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint3 size [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr int R = row_block(WANTED, 1);
    constexpr uint kVectors = staged_vectors(kDownColumns);
    constexpr uint kSums = kDownColumns / 32u;
    constexpr uint kChunks = kDownColumns / 32u;
    threadgroup float4 staged[kVectors];
    threadgroup float sums[kSums];
    const uint threads = size.x;
    const uint row = group.z;
    device const Activation* x = input + row * shape.all_slots * shape.stride;
    device const float* route = routing + row * (2u * shape.top_k + shape.shared);
    const uint first =
        (group.x * (threads / 32u) + simdgroup) * kRowsAtOnce * uint(R) + lane / kRowLanes * uint(R);
    uint rows[R];
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) rows[r] = min(first + uint(r), shape.hidden - 1u);
    float acc[R];
#pragma clang loop unroll(full)
    for (int i = 0; i < R; ++i) acc[i] = 0.0f;
    const uint end = shape.first_slot + shape.slots;
    uint slot = shape.first_slot;  // where the next fill starts
    uint column = 0u;
    while (slot < end) {
        // Stages as many columns of as many slots as fit.
        uint used = 0u;
        uint next_slot = slot;
        uint next_column = column;
        while (next_slot < end && used < kDownColumns) {
            const bool is_shared = next_slot == shape.top_k;
            const uint width = is_shared ? shape.shared_width : shape.width;
            const uint count = min(width - next_column, kDownColumns - used);
            const float weight = route[is_shared ? 2u * shape.top_k : next_slot];
            for (uint j = index; j < count; j += threads) {
                stage_value<F>(float(x[next_slot * shape.stride + next_column + j]) * weight, used + j,
                               kChunks, (threadgroup float*)staged, sums);
            }
            used += count;
            next_column += count;
            if (next_column == width) {
                next_column = 0u;
                ++next_slot;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        used = 0u;
        while (slot < next_slot || column < next_column) {
            const bool is_shared = slot == shape.top_k;
            const uint width = is_shared ? shape.shared_width : shape.width;
            const uint group_shift = is_shared ? shape.shared_group_shift : shape.group_shift;
            const uint count = min(width - column, kDownColumns - used);
            const ulong expert = is_shared ? 0ul : ulong(route[shape.top_k + slot]);
            const ulong skipped = expert * ulong(shape.hidden);
            device const uint* w =
                (is_shared ? shared_codes : codes) + skipped * ulong(width / kChunk * chunk_words(F));
            const ulong skipped_groups = skipped * ulong(width >> group_shift);
            device const Scale* s = (is_shared ? shared_scales : scales) + skipped_groups;
            device const Scale* b = (is_shared ? shared_biases : biases) + skipped_groups;
            multiply_tile<F, R, 1>(w, s, b, rows, width, group_shift, column, count, kChunks,
                                   staged + used / kChunk, sums + used / kChunk, lane, acc);
            used += count;
            column += count;
            if (column == width) {
                column = 0u;
                ++slot;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < R; ++r) {
        const float total = sum_row(acc[r]);
        const uint n = first + uint(r);
        if (lane % kRowLanes == uint(r) && n < shape.hidden) {
            const uint at = row * shape.hidden + n;
            residual[at] = residual[at] + total;
        }
    }
}

#define LILY_ROUTE(format, rows)                                   \
    template [[host_name("route_" #format "_m" #rows)]] [[kernel]] \
    decltype(route<Format::format, rows, 1>) route<Format::format, rows, 1>;
#define LILY_EXPERT_KERNELS(format)                                        \
    template [[host_name("experts_up_" #format)]] [[kernel]]               \
    decltype(experts_up<Format::format, 2>) experts_up<Format::format, 2>; \
    template [[host_name("experts_down_" #format)]] [[kernel]]             \
    decltype(experts_down<Format::format, 2>) experts_down<Format::format, 2>;
#define LILY_EXPERTS(format) \
    LILY_ROUTE(format, 1)    \
    LILY_ROUTE(format, 2)    \
    LILY_ROUTE(format, 4)    \
    LILY_ROUTE(format, 8)    \
    LILY_EXPERT_KERNELS(format)

LILY_EACH_FORMAT(LILY_EXPERTS)
