// The choice of experts, the same for one row and for many.
//
// The top_k logits of a row, lower number first among equals; a NaN comes first, so that it shows. Weights
// are exp(logit - highest) over the sum of the chosen ones, or of all where `normalize` is 0.
#pragma once
#include "common/numbers.h"

constant constexpr const uint kMaxTopK = 32u;
constant constexpr const int kLaneKeys = 16;  // up to 512 experts

// By one simdgroup; `shape` has experts, top_k and normalize.
template <typename Shape>
inline void choose_experts(device const float* logits, constant Shape& shape, uint lane,
                           threadgroup uint* chosen, threadgroup float* weights) {
    uint keys[kLaneKeys];
    float all = 0.0f;
    float top = -INFINITY;
#pragma clang loop unroll(full)
    for (int j = 0; j < kLaneKeys; ++j) {
        const uint expert = lane + 32u * uint(j);
        keys[j] = expert < shape.experts ? order_key(logits[expert]) : 0u;
        if (expert < shape.experts) top = max(top, logits[expert]);
    }
    if (shape.normalize == 0u) {
        top = simd_max(top);
        for (uint expert = lane; expert < shape.experts; expert += 32u) all += exp(logits[expert] - top);
        all = simd_sum(all);
    }
    float mine = 0.0f;
    float total = 0.0f;
    for (uint slot = 0u; slot < shape.top_k; ++slot) {
        uint best = 0u;
#pragma clang loop unroll(full)
        for (int j = 0; j < kLaneKeys; ++j) best = max(best, keys[j]);
        best = simd_max(best);
        uint expert = 0xffffffffu;
#pragma clang loop unroll(full)
        for (int j = 0; j < kLaneKeys; ++j) {
            if (keys[j] == best) expert = min(expert, lane + 32u * uint(j));
        }
        expert = simd_min(expert);
#pragma clang loop unroll(full)
        for (int j = 0; j < kLaneKeys; ++j) {
            if (lane + 32u * uint(j) == expert) keys[j] = 0u;
        }
        const float value = key_value(best);
        if (slot == 0u) top = value;
        const float weight = exp(value - top);
        total += weight;
        if (lane == slot) mine = weight;
        if (lane == 0u) chosen[slot] = expert;
    }
    if (lane < shape.top_k) weights[lane] = mine / (shape.normalize != 0u ? total : all);
}
