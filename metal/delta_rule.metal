// Gated DeltaNet of a decode step, for one to eight rows of one sequence: convolution, gates, delta rule and
// the first half of the gated norm in one launch; the state is read once and written once.
//
// Formula per value head h, key head h / (value_heads / key_heads):
//   mixed = silu(sum over taps of conv[t] input[row - taps + t]), oldest first
//   q = mixed_q / sqrt(|mixed_q|^2 + eps) / sqrt(key_dim),  k = mixed_k / sqrt(|mixed_k|^2 + eps)
//   decay = exp(-exp(a_log) softplus(a + dt_bias)),  beta = sigmoid(b)
//   d = beta (v - decay S^T k);  S <- decay S + k d^T;  o = S^T q
//   out = o norm silu(z), and squares[row, h, slice] = sum of o^2 over the slice's columns: project_add_heads
//   divides by the root mean square of the head, which no threadgroup knows here.
// projected [rows, stride]: q | k | v (channels) | z | b | a. state fp32 [value_heads, value_dim, key_dim], read;
// next_state, the same or another: written. A step whose token turns out not to be wanted is then taken back by
// going on from `state`.
// history [16, channels]: the inputs of position p lie at p % 16. A launch reads the conv_width - 1 positions
// before its rows and writes its rows' own, never the same ones, so no copy is shifted, threadgroups don't
// race, and rows can be taken back by position alone.
// Launch: (value_dim / 16, value_heads) threadgroups of 128 threads: 256 for 32 heads of 128. A simdgroup has
// four columns of the state, a lane key_dim / 32 keys of each, in registers through all rows; sums over keys
// are simd_sum. Kernels by key_dim / 32 and by the rows they have room for; the bits depend on neither.
// Bound: reading and writing the state. Each threadgroup of a head repeats the convolution of q and k.
#include "common/numbers.h"

struct DeltaShape {
    uint rows;
    uint key_heads;
    uint value_heads;
    uint value_dim;
    uint conv_width;
    uint stride;  // of a projected row
    float eps;    // of the length of q and k
};

// The less clever path, for comparison (metal/ablation/raw_delta_rule.metal): out = o, the norm is a launch of
// its own.
#ifdef LILY_RAW_OUTPUT
constant constexpr const bool kRawOutput = true;
#else
constant constexpr const bool kRawOutput = false;
#endif

constant constexpr const uint kColumns = 16u;  // of the state, per threadgroup
constant constexpr const uint kHistory = 16u;  // remembered positions
constant constexpr const int kOwn = 4;         // columns of a simdgroup
constant constexpr const uint kThreads = 128u;

template <int KEYS, int M>
[[kernel]] void delta_rule(device const Activation* projected [[buffer(0)]],
                           device const float* conv [[buffer(1)]], device const float* a_log [[buffer(2)]],
                           device const float* dt_bias [[buffer(3)]], device const float* norm [[buffer(4)]],
                           device Activation* history [[buffer(5)]], device const float* state [[buffer(6)]],
                           device Activation* out [[buffer(7)]], device float* squares [[buffer(8)]],
                           device const uint* positions [[buffer(9)]],
                           constant DeltaShape& shape [[buffer(10)]], device float* next_state [[buffer(11)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
    constexpr uint kDim = 32u * uint(KEYS);        // key_dim
    constexpr uint kMixed = 2u * kDim + kColumns;  // q | k | the slice of v
    constexpr uint kAllMixed = kMixed * uint(M);
    constexpr uint kAllSquares = 4u * uint(M);
    threadgroup float mixed[kAllMixed];
    threadgroup float slice_squares[kAllSquares];
    const uint slice = group.x;
    const uint head = group.y;
    const uint ratio = shape.value_heads / shape.key_heads;
    const uint key_head = head / ratio;
    const uint keys = shape.key_heads * kDim;
    const uint values = shape.value_heads * shape.value_dim;
    const uint channels = 2u * keys + values;
    const uint first_column = head * shape.value_dim + slice * kColumns;
    const uint position = positions[0];
    const uint taps = shape.conv_width - 1u;
    // One threadgroup per key head remembers the inputs of q and k, each those of its own columns of v.
    const bool keeps_keys = slice == 0u && head % ratio == 0u;
    for (uint i = index; i < shape.rows * kMixed; i += kThreads) {
        const uint row = i / kMixed;
        const uint at = i % kMixed;
        const uint channel = at < kDim        ? key_head * kDim + at
                             : at < 2u * kDim ? keys + key_head * kDim + at - kDim
                                              : 2u * keys + first_column + at - 2u * kDim;
        float acc = 0.0f;
        for (uint t = 0u; t < shape.conv_width; ++t) {
            float x = 0.0f;
            if (row + t >= taps) {
                x = float(projected[(row + t - taps) * shape.stride + channel]);
            } else if (position + row + t >= taps) {
                x = float(history[(position + row + t - taps) % kHistory * channels + channel]);
            }
            acc = fma(x, conv[t * channels + channel], acc);
        }
        mixed[i] = silu(acc);
        if (at >= 2u * kDim || keeps_keys) {
            history[(position + row) % kHistory * channels + channel] =
                projected[row * shape.stride + channel];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = simdgroup; i < 2u * shape.rows; i += 4u) {
        threadgroup float* x = mixed + i / 2u * kMixed + i % 2u * kDim + lane * uint(KEYS);
        float length = 0.0f;
#pragma clang loop unroll(full)
        for (int j = 0; j < KEYS; ++j) length = fma(x[j], x[j], length);
        float inverse = 1.0f / sqrt(simd_sum(length) + shape.eps);
        if (i % 2u == 0u) inverse *= 1.0f / sqrt(float(kDim));
#pragma clang loop unroll(full)
        for (int j = 0; j < KEYS; ++j) x[j] = x[j] * inverse;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint own = (first_column + simdgroup * uint(kOwn)) * kDim + lane * uint(KEYS);
    float s[kOwn * KEYS];
#pragma clang loop unroll(full)
    for (int c = 0; c < kOwn; ++c) {
        if (KEYS == 4) {
            const float4 four = *(device const float4*)(state + own + uint(c) * kDim);
            s[c * KEYS] = four.x;
            s[c * KEYS + 1 % KEYS] = four.y;
            s[c * KEYS + 2 % KEYS] = four.z;
            s[c * KEYS + 3 % KEYS] = four.w;
        } else {
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) s[c * KEYS + j] = state[own + uint(c) * kDim + uint(j)];
        }
    }
    const float rate = -exp(a_log[head]);
    for (uint row = 0u; row < shape.rows; ++row) {
        device const Activation* gates = projected + row * shape.stride + channels;
        const float beta = sigmoid(float(gates[values + head]));
        const float a = float(gates[values + shape.value_heads + head]) + dt_bias[head];
        const float decay = exp(rate * softplus(a));
        threadgroup const float* x = mixed + row * kMixed;
        float q[KEYS];
        float k[KEYS];
#pragma clang loop unroll(full)
        for (int j = 0; j < KEYS; ++j) {
            q[j] = x[lane * uint(KEYS) + uint(j)];
            k[j] = x[kDim + lane * uint(KEYS) + uint(j)];
        }
        float total = 0.0f;
#pragma clang loop unroll(full)
        for (int c = 0; c < kOwn; ++c) {
            float recalled = 0.0f;
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) recalled = fma(s[c * KEYS + j], k[j], recalled);
            recalled = simd_sum(recalled);
            const float v = x[2u * kDim + simdgroup * uint(kOwn) + uint(c)];
            const float delta = beta * fma(-decay, recalled, v);
            float o = 0.0f;
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) {
                const float faded = decay * s[c * KEYS + j];
                s[c * KEYS + j] = fma(k[j], delta, faded);
                o = fma(s[c * KEYS + j], q[j], o);
            }
            o = simd_sum(o);
            total = fma(o, o, total);
            if (lane == uint(c)) {
                const uint column = simdgroup * uint(kOwn) + uint(c);
                const float z = float(gates[first_column + column]);
                const float y = o * norm[slice * kColumns + column] * silu(z);
                out[row * values + first_column + column] = Activation(kRawOutput ? o : y);
            }
        }
        if (lane == 0u) slice_squares[row * 4u + simdgroup] = total;
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < kOwn; ++c) {
        if (KEYS == 4) {
            *(device float4*)(next_state + own + uint(c) * kDim) =
                float4(s[c * KEYS], s[c * KEYS + 1 % KEYS], s[c * KEYS + 2 % KEYS], s[c * KEYS + 3 % KEYS]);
        } else {
#pragma clang loop unroll(full)
            for (int j = 0; j < KEYS; ++j) next_state[own + uint(c) * kDim + uint(j)] = s[c * KEYS + j];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < shape.rows) {
        float total = slice_squares[index * 4u];
        for (uint i = 1u; i < 4u; ++i) total += slice_squares[index * 4u + i];
        squares[(index * shape.value_heads + head) * groups.x + slice] = total;
    }
}

#define LILY_DELTA(keys, rows)                                         \
    template [[host_name("delta_rule_k" #keys "_m" #rows)]] [[kernel]] \
    decltype(delta_rule<keys, rows>) delta_rule<keys, rows>;

LILY_DELTA(1, 1)
LILY_DELTA(1, 8)
LILY_DELTA(2, 1)
LILY_DELTA(2, 8)
LILY_DELTA(4, 1)
LILY_DELTA(4, 8)
