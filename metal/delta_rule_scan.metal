// Gated DeltaNet of a prefill chunk of one sequence: what delta_rule.metal does for a few rows.
//
// delta_prepare  mixed [rows, channels] = q | k | v after convolution and silu, q and k divided by their
//                length as in delta_rule, q also by sqrt(key_dim). gates [rows, 2 value_heads + key_heads],
//                fp32: decay | beta | q k of each key head. The last 16 rows go to the convolution's ring.
//                A simdgroup has the q and k of a key head, or 32 KEYS columns of v, or the gates; its window
//                of inputs stays in registers for 32 rows. Kernels by key_dim / 32 and by taps.
//                Launch: (ceil((key_heads + ceil(values / key_dim) + 1) / 4), ceil(rows / 32)) threadgroups
//                of 128 threads.
// delta_scan     per row: d = beta (v - decay S^T k);  S <- decay S + k d^T;  o = decay S^T q + (q k) d:
//                S^T q of the new state, but both products take the old one, and their sums run together.
//                A state column is in eight lanes of one simdgroup, 4 KEYS keys a lane, in registers from the
//                first row to the last; the next row is loaded while one is computed.
//                Launch: (value_dim / 16, value_heads) threadgroups of 128 threads, four columns a simdgroup.
// delta_blocks   the same for 16 rows at a time, with L[t, i] = product of decays i + 1 .. t, g_t = L[t, -1]:
//                  D = (I + A)^-1 beta (V - g K S),  A[t, i] = beta_t L[t, i] k_t k_i for i < t
//                  O = g Q S + M D,  M[t, i] = L[t, i] q_t k_i for i <= t
//                  S <- g_15 S + K^T (L[15, :] D)
//                Products by simdgroup matrices, the inverse by forward substitution, everything fp32. A
//                simdgroup has eight columns of the state in registers. Rows beyond the end have decay 1,
//                beta 0.
//                Launch: (ceil(value_dim / 32), value_heads) threadgroups of 128 threads.
// gated_norm_rows  out = o / sqrt(mean(o^2) + eps) * norm * silu(z) per head, in place.
//                Launch: (ceil(value_heads / 4), rows) threadgroups of 128 threads, a simdgroup per head.
// projected [rows, stride], state [value_heads, value_dim, key_dim] and history [16, channels] are those of
// delta_rule.metal. q, k, v and o are of the activations' type, state and gates fp32.
// delta_scan has the same bits however rows are cut into chunks; delta_blocks if chunks are multiples of 16.
// Bound: delta_scan latency of a row, delta_blocks multiply-adds; the state is read once and written once.
#include "common/fragments.h"

struct DeltaRowsShape {
    uint rows;
    uint key_heads;
    uint value_heads;
    uint value_dim;
    uint channels;  // 2 key_heads key_dim + value_heads value_dim: q | k | v
    uint stride;    // of a projected row
    float eps;      // of the length of q and k, or of the norm
};

constant constexpr const uint kHistory = 16u;      // remembered positions
constant constexpr const uint kRowTile = 32u;      // rows of a threadgroup of delta_prepare
constant constexpr const uint kBlock = 16u;        // rows of a block of delta_blocks
constant constexpr const uint kBlockStride = 20u;  // of a matrix over a block's rows, against bank conflicts

// Inputs channel, channel + 32, ... of a row before the convolution; negative rows are in the ring.
template <int KEYS>
inline void load_inputs(device const Activation* projected, device const Activation* history, int row,
                        uint position, uint stride, uint channels, uint channel, uint end, thread float* x) {
    const int place = int(position) + row;
    device const Activation* from =
        row >= 0 ? projected + uint(row) * stride : history + uint(max(place, 0)) % kHistory * channels;
#pragma clang loop unroll(full)
    for (int j = 0; j < KEYS; ++j) {
        const uint at = channel + 32u * uint(j);
        x[j] = place >= 0 && at < end ? float(from[at]) : 0.0f;
    }
}

// Takes the inputs of a row into the window and gives silu of their convolution.
template <int KEYS, int TAPS>
inline void convolve(thread float* window, thread const float* weights, thread const float* x,
                     thread float* mixed) {
#pragma clang loop unroll(full)
    for (int j = 0; j < KEYS; ++j) {
        float acc = 0.0f;
#pragma clang loop unroll(full)
        for (int t = 0; t + 1 < TAPS; ++t) acc = fma(window[t * KEYS + j], weights[t * KEYS + j], acc);
        acc = fma(x[j], weights[(TAPS - 1) * KEYS + j], acc);
        mixed[j] = silu(acc);
#pragma clang loop unroll(full)
        for (int t = 0; t + 2 < TAPS; ++t) window[t * KEYS + j] = window[(t + 1) * KEYS + j];
        if (TAPS > 1) window[(TAPS - 2) * KEYS + j] = x[j];
    }
}

template <int KEYS, int TAPS>
inline void begin_window(device const Activation* projected, device const Activation* history,
                         device const float* conv, int first, uint position, uint stride, uint channels,
                         uint channel, uint end, thread float* window, thread float* weights) {
#pragma clang loop unroll(full)
    for (int t = 0; t < TAPS; ++t) {
#pragma clang loop unroll(full)
        for (int j = 0; j < KEYS; ++j) {
            const uint at = channel + 32u * uint(j);
            weights[t * KEYS + j] = at < end ? conv[uint(t) * channels + at] : 0.0f;
        }
        if (t + 1 < TAPS) {
            load_inputs<KEYS>(projected, history, first + t - (TAPS - 1), position, stride, channels, channel,
                              end, window + t * KEYS);
        }
    }
}

// The last rows' inputs to the ring; the same thread has read of it what it needs.
template <int KEYS>
inline void remember(device const Activation* projected, device Activation* history, uint rows, uint position,
                     uint stride, uint channels, uint channel, uint end) {
    for (uint row = rows > kHistory ? rows - kHistory : 0u; row < rows; ++row) {
#pragma clang loop unroll(full)
        for (int j = 0; j < KEYS; ++j) {
            const uint at = channel + 32u * uint(j);
            if (at < end) history[(position + row) % kHistory * channels + at] = projected[row * stride + at];
        }
    }
}

template <int KEYS, int TAPS>
[[kernel, max_total_threads_per_threadgroup(128)]] void delta_prepare(
    device const Activation* projected [[buffer(0)]], device const float* conv [[buffer(1)]],
    device const float* a_log [[buffer(2)]], device const float* dt_bias [[buffer(3)]],
    device Activation* history [[buffer(4)]], device Activation* mixed [[buffer(5)]],
    device float* gates [[buffer(6)]], device const uint* positions [[buffer(7)]],
    constant DeltaRowsShape& shape [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kDim = 32u * uint(KEYS);
    constexpr int kWindow = KEYS * TAPS;
    const uint keys = shape.key_heads * kDim;
    const uint values = shape.value_heads * shape.value_dim;
    const uint channels = shape.channels;
    const uint value_units = (values + kDim - 1u) / kDim;
    const uint gate_stride = 2u * shape.value_heads + shape.key_heads;
    const uint unit = group.x * 4u + simdgroup;
    const uint first = group.y * kRowTile;
    const uint end = min(first + kRowTile, shape.rows);
    const uint position = positions[0];
    if (unit < shape.key_heads) {
        const uint q_channel = unit * kDim + lane;
        const uint k_channel = keys + q_channel;
        float q_window[kWindow];
        float k_window[kWindow];
        float q_weights[kWindow];
        float k_weights[kWindow];
        begin_window<KEYS, TAPS>(projected, history, conv, int(first), position, shape.stride, channels,
                                 q_channel, keys, q_window, q_weights);
        begin_window<KEYS, TAPS>(projected, history, conv, int(first), position, shape.stride, channels,
                                 k_channel, 2u * keys, k_window, k_weights);
        for (uint row = first; row < end; ++row) {
            float x[KEYS];
            float q[KEYS];
            float k[KEYS];
            load_inputs<KEYS>(projected, history, int(row), position, shape.stride, channels, q_channel, keys,
                              x);
            convolve<KEYS, TAPS>(q_window, q_weights, x, q);
            load_inputs<KEYS>(projected, history, int(row), position, shape.stride, channels, k_channel,
                              2u * keys, x);
            convolve<KEYS, TAPS>(k_window, k_weights, x, k);
            float2 lengths = float2(0.0f);
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j)
                lengths = float2(fma(q[j], q[j], lengths.x), fma(k[j], k[j], lengths.y));
            const float q_scale = 1.0f / sqrt(simd_sum(lengths.x) + shape.eps) * (1.0f / sqrt(float(kDim)));
            const float k_scale = 1.0f / sqrt(simd_sum(lengths.y) + shape.eps);
            float overlap = 0.0f;
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) {
                const Activation stored_q = Activation(q[j] * q_scale);
                const Activation stored_k = Activation(k[j] * k_scale);
                mixed[row * channels + q_channel + 32u * uint(j)] = stored_q;
                mixed[row * channels + k_channel + 32u * uint(j)] = stored_k;
                overlap = fma(float(stored_q), float(stored_k), overlap);
            }
            overlap = simd_sum(overlap);
            if (lane == 0u) gates[row * gate_stride + 2u * shape.value_heads + unit] = overlap;
        }
        if (group.y == 0u) {
            remember<KEYS>(projected, history, shape.rows, position, shape.stride, channels, q_channel, keys);
            remember<KEYS>(projected, history, shape.rows, position, shape.stride, channels, k_channel,
                           2u * keys);
        }
    } else if (unit < shape.key_heads + value_units) {
        const uint channel = 2u * keys + (unit - shape.key_heads) * kDim + lane;
        float window[kWindow];
        float weights[kWindow];
        begin_window<KEYS, TAPS>(projected, history, conv, int(first), position, shape.stride, channels,
                                 channel, channels, window, weights);
        for (uint row = first; row < end; ++row) {
            float x[KEYS];
            float v[KEYS];
            load_inputs<KEYS>(projected, history, int(row), position, shape.stride, channels, channel,
                              channels, x);
            convolve<KEYS, TAPS>(window, weights, x, v);
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) {
                const uint at = channel + 32u * uint(j);
                if (at < channels) mixed[row * channels + at] = Activation(v[j]);
            }
        }
        if (group.y == 0u) {
            remember<KEYS>(projected, history, shape.rows, position, shape.stride, channels, channel,
                           channels);
        }
    } else if (unit == shape.key_heads + value_units) {
        for (uint head = lane; head < shape.value_heads; head += 32u) {
            const float rate = -exp(a_log[head]);
            const float bias = dt_bias[head];
            for (uint row = first; row < end; ++row) {
                device const Activation* x = projected + row * shape.stride + channels + values + head;
                device float* target = gates + row * gate_stride + head;
                target[0] = exp(rate * softplus(float(x[shape.value_heads]) + bias));
                target[shape.value_heads] = sigmoid(float(x[0]));
            }
        }
    }
}

// q and k of a lane's keys, v of its column, and the gates of a row.
template <int VECTORS>
inline void load_scan_row(device const Activation* mixed, device const float* gates, uint channels,
                          uint gate_stride, uint row, uint q_at, uint k_at, uint v_at, uint head, uint heads,
                          uint key_head, thread vec<Activation, 4>* qk, thread float* more) {
    device const Activation* x = mixed + row * channels;
#pragma clang loop unroll(full)
    for (int i = 0; i < VECTORS; ++i) {
        qk[i] = ((device const vec<Activation, 4>*)(x + q_at))[i];
        qk[VECTORS + i] = ((device const vec<Activation, 4>*)(x + k_at))[i];
    }
    device const float* gate = gates + row * gate_stride;
    more[0] = float(x[v_at]);
    more[1] = gate[head];
    more[2] = gate[heads + head];
    more[3] = gate[2u * heads + key_head];
}

template <int KEYS>
[[kernel, max_total_threads_per_threadgroup(128)]] void delta_scan(
    device const Activation* mixed [[buffer(0)]], device const float* gates [[buffer(1)]],
    device float* state [[buffer(2)]], device Activation* out [[buffer(3)]],
    constant DeltaRowsShape& shape [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kDim = 32u * uint(KEYS);
    constexpr int kVectors = KEYS;  // of four keys: a lane has 4 KEYS
    const uint head = group.y;
    const uint key_head = head / (shape.value_heads / shape.key_heads);
    const uint values = shape.value_heads * shape.value_dim;
    const uint keys = shape.key_heads * kDim;
    const uint channels = shape.channels;
    const uint gate_stride = 2u * shape.value_heads + shape.key_heads;
    const uint column = head * shape.value_dim + group.x * 16u + simdgroup * 4u + lane / 8u;
    const uint own = lane % 8u * uint(4 * KEYS);
    const uint q_at = key_head * kDim + own;
    const uint k_at = keys + q_at;
    const uint v_at = 2u * keys + column;
    device float4* stored = (device float4*)(state + column * kDim + own);
    float4 s[kVectors];
#pragma clang loop unroll(full)
    for (int i = 0; i < kVectors; ++i) s[i] = stored[i];
    vec<Activation, 4> next[2 * kVectors];
    float next_more[4];
    load_scan_row<kVectors>(mixed, gates, channels, gate_stride, 0u, q_at, k_at, v_at, head,
                            shape.value_heads, key_head, next, next_more);
    for (uint row = 0u; row < shape.rows; ++row) {
        float4 q[kVectors];
        float4 k[kVectors];
#pragma clang loop unroll(full)
        for (int i = 0; i < kVectors; ++i) {
            const vec<Activation, 4> a = next[i];
            const vec<Activation, 4> b = next[kVectors + i];
            q[i] = float4(float(a.x), float(a.y), float(a.z), float(a.w));
            k[i] = float4(float(b.x), float(b.y), float(b.z), float(b.w));
        }
        const float v = next_more[0];
        const float decay = next_more[1];
        const float beta = next_more[2];
        const float overlap = next_more[3];
        load_scan_row<kVectors>(mixed, gates, channels, gate_stride, min(row + 1u, shape.rows - 1u), q_at,
                                k_at, v_at, head, shape.value_heads, key_head, next, next_more);
        float4 recalled4 = float4(0.0f);
        float4 asked4 = float4(0.0f);
#pragma clang loop unroll(full)
        for (int i = 0; i < kVectors; ++i) {
            recalled4 = fma(s[i], k[i], recalled4);
            asked4 = fma(s[i], q[i], asked4);
        }
        float2 sums = float2((recalled4.x + recalled4.y) + (recalled4.z + recalled4.w),
                             (asked4.x + asked4.y) + (asked4.z + asked4.w));
        sums = sums + simd_shuffle_xor(sums, ushort(1));
        sums = sums + simd_shuffle_xor(sums, ushort(2));
        sums = sums + simd_shuffle_xor(sums, ushort(4));
        const float delta = beta * fma(-decay, sums.x, v);
#pragma clang loop unroll(full)
        for (int i = 0; i < kVectors; ++i) s[i] = fma(k[i], float4(delta), decay * s[i]);
        if (lane % 8u == 0u) out[row * values + column] = Activation(fma(decay, sums.y, overlap * delta));
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < kVectors; ++i) stored[i] = s[i];
}

// acc += rows 8 a .. of x times the transpose of rows 8 b .. of y, over `cols` columns.
inline Fragment product_of_rows(threadgroup const float* x, threadgroup const float* y, uint stride,
                                uint cols, uint row, uint column) {
    Fragment acc = fragment(0.0f, 0.0f);
    for (uint k = 0u; k < cols; k += 8u) {
        threadgroup const float* left = x + row * stride + k + column;
        threadgroup const float* right = y + column * stride + k + row;
        simdgroup_multiply_accumulate(acc, fragment(left[0], left[1]), fragment(right[0], right[stride]),
                                      acc);
    }
    return acc;
}

template <int KEYS>
[[kernel, max_total_threads_per_threadgroup(128)]] void delta_blocks(
    device const Activation* mixed [[buffer(0)]], device const float* gates [[buffer(1)]],
    device float* state [[buffer(2)]], device Activation* out [[buffer(3)]],
    constant DeltaRowsShape& shape [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kDim = 32u * uint(KEYS);
    constexpr uint kStride = kDim + 4u;
    constexpr int kFragments = 4 * KEYS;  // of eight keys
    constexpr uint kRows = 16u * kStride;
    threadgroup float q[kRows];
    threadgroup float k[kRows];
    threadgroup float decays[340];  // L[t, i] at t * 20 + i, and g_t at t * 20 + 16
    threadgroup float betas[16];
    threadgroup float among[320];   // A
    threadgroup float asked[320];   // M
    threadgroup float deltas[512];  // [simdgroups, 16, 8]
    const uint head = group.y;
    const uint key_head = head / (shape.value_heads / shape.key_heads);
    const uint values = shape.value_heads * shape.value_dim;
    const uint keys = shape.key_heads * kDim;
    const uint channels = shape.channels;
    const uint gate_stride = 2u * shape.value_heads + shape.key_heads;
    const uint row = fragment_row(lane);
    const uint column = fragment_column(lane);
    const uint own_column = group.x * 32u + simdgroup * 8u;
    const bool has_columns = own_column < shape.value_dim;
    const uint first_column = head * shape.value_dim + (has_columns ? own_column : 0u);
    device float* stored = state + (first_column + column) * kDim + row;
    threadgroup float* own = deltas + simdgroup * 128u;
    Fragment s[kFragments];  // [keys, columns]
#pragma clang loop unroll(full)
    for (int f = 0; f < kFragments; ++f) {
        s[f] = has_columns ? fragment(stored[8 * f], stored[kDim + 8u * uint(f)]) : fragment(0.0f, 0.0f);
    }
    for (uint begin = 0u; begin < shape.rows; begin += kBlock) {
        const uint count = min(kBlock, shape.rows - begin);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < kBlock * kDim; i += 128u) {
            const uint t = i / kDim;
            device const Activation* x = mixed + (begin + t) * channels + key_head * kDim + i % kDim;
            q[t * kStride + i % kDim] = t < count ? float(x[0]) : 0.0f;
            k[t * kStride + i % kDim] = t < count ? float(x[keys]) : 0.0f;
        }
        if (index <= kBlock) {
            // Column i of L; the last one begins before the block.
            float product = 1.0f;
            for (uint t = 0u; t < kBlock; ++t) {
                const bool begun = index == kBlock || t > index;
                if (begun && t < count) product *= gates[(begin + t) * gate_stride + head];
                decays[t * kBlockStride + index] = begun || t == index ? product : 0.0f;
            }
            if (index < kBlock) {
                betas[index] =
                    index < count ? gates[(begin + index) * gate_stride + shape.value_heads + head] : 0.0f;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        {
            const uint t = simdgroup / 2u * 8u;
            const uint i = simdgroup % 2u * 8u;
            const float2 kk = fragment_values(
                product_of_rows(k + t * kStride, k + i * kStride, kStride, kDim, row, column));
            const float2 qk = fragment_values(
                product_of_rows(q + t * kStride, k + i * kStride, kStride, kDim, row, column));
            const uint at = (t + row) * kBlockStride + i + column;
            const float beta = betas[t + row];
            among[at] = beta * decays[at] * kk.x;
            among[at + 1u] = beta * decays[at + 1u] * kk.y;
            asked[at] = decays[at] * qk.x;
            asked[at + 1u] = decays[at + 1u] * qk.y;
        }
        // K S and Q S over the state before the block.
        Fragment recalled[2];
        Fragment answer[2];
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            recalled[i] = fragment(0.0f, 0.0f);
            answer[i] = fragment(0.0f, 0.0f);
#pragma clang loop unroll(full)
            for (int f = 0; f < kFragments; ++f) {
                const uint at = (8u * uint(i) + row) * kStride + 8u * uint(f) + column;
                simdgroup_multiply_accumulate(recalled[i], fragment(k[at], k[at + 1u]), s[f], recalled[i]);
                simdgroup_multiply_accumulate(answer[i], fragment(q[at], q[at + 1u]), s[f], answer[i]);
            }
            const uint t = 8u * uint(i) + row;
            const float2 old = fragment_values(recalled[i]);
            const float faded = decays[t * kBlockStride + kBlock];
            device const Activation* v = mixed + (begin + t) * channels + 2u * keys + first_column + column;
            const float v0 = t < count ? float(v[0]) : 0.0f;
            const float v1 = t < count ? float(v[1]) : 0.0f;
            own[t * 8u + column] = betas[t] * fma(-faded, old.x, v0);
            own[t * 8u + column + 1u] = betas[t] * fma(-faded, old.y, v1);
            answer[i] = fragment(fragment_values(answer[i]).x * faded, fragment_values(answer[i]).y * faded);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // Forward substitution: a lane has a column, four lanes the same.
        float d[16];
#pragma clang loop unroll(full)
        for (int t = 0; t < 16; ++t) {
            float sum = own[uint(t) * 8u + lane % 8u];
#pragma clang loop unroll(full)
            for (int i = 0; i < t; ++i) sum = fma(-among[t * 20 + i], d[i], sum);
            d[t] = sum;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (lane < 8u) {
#pragma clang loop unroll(full)
            for (int t = 0; t < 16; ++t) own[uint(t) * 8u + lane] = d[t];
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        Fragment delta[2];
        Fragment weighed[2];
        const float faded = decays[15u * kBlockStride + kBlock];
#pragma clang loop unroll(full)
        for (int j = 0; j < 2; ++j) {
            const uint t = 8u * uint(j) + row;
            const float2 two = float2(own[t * 8u + column], own[t * 8u + column + 1u]);
            const float kept = decays[15u * kBlockStride + t];
            delta[j] = fragment(two.x, two.y);
            weighed[j] = fragment(two.x * kept, two.y * kept);
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            const uint t = 8u * uint(i) + row;
#pragma clang loop unroll(full)
            for (int j = 0; j < 2; ++j) {
                const uint at = t * kBlockStride + 8u * uint(j) + column;
                simdgroup_multiply_accumulate(answer[i], fragment(asked[at], asked[at + 1u]), delta[j],
                                              answer[i]);
            }
            if (has_columns && t < count) {
                device Activation* target = out + (begin + t) * values + first_column + column;
                target[0] = Activation(fragment_values(answer[i]).x);
                target[1] = Activation(fragment_values(answer[i]).y);
            }
        }
#pragma clang loop unroll(full)
        for (int f = 0; f < kFragments; ++f) {
            const float2 old = fragment_values(s[f]);
            s[f] = fragment(old.x * faded, old.y * faded);
#pragma clang loop unroll(full)
            for (int j = 0; j < 2; ++j) {
                const uint at = (8u * uint(j) + column) * kStride + 8u * uint(f) + row;
                simdgroup_multiply_accumulate(s[f], fragment(k[at], k[at + kStride]), weighed[j], s[f]);
            }
        }
    }
    if (!has_columns) return;
#pragma clang loop unroll(full)
    for (int f = 0; f < kFragments; ++f) {
        stored[8 * f] = fragment_values(s[f]).x;
        stored[kDim + 8u * uint(f)] = fragment_values(s[f]).y;
    }
}

[[kernel]] void gated_norm_rows(device Activation* out [[buffer(0)]],
                                device const Activation* projected [[buffer(1)]],
                                device const float* norm [[buffer(2)]],
                                constant DeltaRowsShape& shape [[buffer(3)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
    const uint head = group.x * 4u + simdgroup;
    const uint row = group.y;
    if (head >= shape.value_heads) return;
    const uint values = shape.value_heads * shape.value_dim;
    device Activation* o = out + row * values + head * shape.value_dim;
    device const Activation* z = projected + row * shape.stride + shape.stride - values -
                                 2u * shape.value_heads + head * shape.value_dim;
    float squares = 0.0f;
    for (uint d = lane; d < shape.value_dim; d += 32u) squares = fma(float(o[d]), float(o[d]), squares);
    const float inverse = 1.0f / sqrt(simd_sum(squares) / float(shape.value_dim) + shape.eps);
    for (uint d = lane; d < shape.value_dim; d += 32u) {
        o[d] = Activation(float(o[d]) * inverse * norm[d] * silu(float(z[d])));
    }
}

#define LILY_PREPARE(keys, taps)                                          \
    template [[host_name("delta_prepare_k" #keys "_c" #taps)]] [[kernel]] \
    decltype(delta_prepare<keys, taps>) delta_prepare<keys, taps>;
#define LILY_DELTA_ROWS(keys)                                 \
    LILY_PREPARE(keys, 2)                                     \
    LILY_PREPARE(keys, 3)                                     \
    LILY_PREPARE(keys, 4)                                     \
    template [[host_name("delta_scan_k" #keys)]] [[kernel]]   \
    decltype(delta_scan<keys>) delta_scan<keys>;              \
    template [[host_name("delta_blocks_k" #keys)]] [[kernel]] \
    decltype(delta_blocks<keys>) delta_blocks<keys>;

LILY_DELTA_ROWS(1)
LILY_DELTA_ROWS(2)
LILY_DELTA_ROWS(4)
