#include "backend/cpu/routing.h"

#include <cmath>

namespace lily::cpu {

void route_row(const ExpertShape& shape, const float* logits, float* routing) {
    const int64_t k = shape.top_k;
    float* weights = routing;
    float* chosen = routing + k;
    // Insertion into a short sorted list: a later expert enters only when strictly larger.
    int64_t filled = 0;
    for (int64_t e = 0; e < shape.experts; ++e) {
        const float value = logits[e];
        if (filled == k && !(value > weights[k - 1])) continue;
        int64_t at = filled < k ? filled++ : k - 1;
        for (; at > 0 && value > weights[at - 1]; --at) {
            weights[at] = weights[at - 1];
            chosen[at] = chosen[at - 1];
        }
        weights[at] = value;
        chosen[at] = static_cast<float>(e);
    }
    const float top = weights[0];
    float total = 0.0f;
    if (shape.normalize) {
        for (int64_t i = 0; i < k; ++i) total += std::exp(weights[i] - top);
    } else {
        for (int64_t e = 0; e < shape.experts; ++e) total += std::exp(logits[e] - top);
    }
    for (int64_t i = 0; i < k; ++i) weights[i] = std::exp(weights[i] - top) / total;
    if (shape.shared_width > 0) routing[2 * k] = 1.0f / (1.0f + std::exp(-logits[shape.experts]));
}

void ExpertGroups::build(const ExpertShape& shape, const float* routing, int64_t stride, int64_t rows,
                         bool together) {
    const int64_t slots = shape.slots();
    const int64_t groups = shape.experts + (slots > shape.top_k ? 1 : 0);
    const auto group_of = [&](int64_t row, int64_t slot) {
        return slot < shape.top_k ? RoutingRow(routing + row * stride, shape.top_k).expert(slot)
                                  : shape.experts;
    };
    counts_.assign(static_cast<size_t>(groups + 1), 0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t slot = 0; slot < slots; ++slot) ++counts_[static_cast<size_t>(group_of(row, slot) + 1)];
    }
    for (size_t g = 1; g < counts_.size(); ++g) counts_[g] += counts_[g - 1];
    pairs_.resize(static_cast<size_t>(rows * slots));
    std::vector<int32_t> next(counts_.begin(), counts_.end() - 1);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t slot = 0; slot < slots; ++slot) {
            pairs_[static_cast<size_t>(next[static_cast<size_t>(group_of(row, slot))]++)] =
                static_cast<int32_t>(row * slots + slot);
        }
    }
    loads_.clear();
    for (int64_t g = 0; g < groups; ++g) {
        const auto begin = static_cast<size_t>(counts_[static_cast<size_t>(g)]);
        const int64_t count = counts_[static_cast<size_t>(g + 1)] - static_cast<int64_t>(begin);
        const int64_t size = together ? count : 1;
        for (int64_t i = 0; i < count; i += size) loads_.push_back({g, pairs_.data() + begin + i, size});
    }
}

}  // namespace lily::cpu
