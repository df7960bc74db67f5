// Number types between operations, and the few functions every kernel family needs.
//
// Activations between operations are bf16 (LILY_ACTIVATION float builds the same kernels with fp32 ones, for
// verification). The residual stream is the accumulator of all layers and stays fp32, as do norms, softmax,
// router logits, decay, recurrent state and every sum. Scales and biases are as in the checkpoint: bf16, or
// LILY_SCALE float for other types.
#pragma once
#include <metal_simdgroup>
#include <metal_stdlib>

using namespace metal;

#ifndef LILY_ACTIVATION
#define LILY_ACTIVATION bfloat
#endif
#ifndef LILY_SCALE
#define LILY_SCALE bfloat
#endif

typedef LILY_ACTIVATION Activation;
typedef LILY_SCALE Scale;

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

inline float silu(float x) { return x / (1.0f + exp(-x)); }

// log(1 + e^x) without overflow, exact to fp32 rounding of its larger part
inline float softplus(float x) { return max(x, 0.0f) + log(1.0f + exp(-abs(x))); }

// Unsigned numbers in the order of the floats, never 0; NaN is above all, and both zeros are equal.
inline uint order_key(float x) {
    if (isnan(x)) return 0xffffffffu;
    const uint bits = x == 0.0f ? 0u : as_type<uint>(x);
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

inline float key_value(uint key) {
    return as_type<float>((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key);
}
