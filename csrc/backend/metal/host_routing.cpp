#include "backend/metal/host_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lily::metal {
namespace {

// Whether expert `a` comes before `b`: the larger logit, the lower number among equals; a NaN first, so that
// it shows.
bool before(std::span<const float> logits, uint32_t a, uint32_t b) {
    const bool nan_a = std::isnan(logits[a]), nan_b = std::isnan(logits[b]);
    if (nan_a != nan_b) return nan_a;
    if (!nan_a && logits[a] != logits[b]) return logits[a] > logits[b];
    return a < b;
}

}  // namespace

HostRouting route_on_host(const RoutingShape& shape, std::span<const float> logits) {
    const uint32_t slots = shape.top_k + shape.shared;
    HostRouting result;
    result.routing.resize(size_t{shape.rows} * (shape.top_k + slots));
    std::vector<std::vector<uint32_t>> entries(shape.experts);  // of each expert, rows ascending
    std::vector<uint32_t> order(shape.experts);
    for (uint32_t row = 0; row < shape.rows; ++row) {
        const auto all = logits.subspan(size_t{row} * (shape.experts + shape.shared));
        const auto own = all.first(shape.experts);
        std::iota(order.begin(), order.end(), 0u);
        std::ranges::partial_sort(order, order.begin() + shape.top_k,
                                  [&](uint32_t a, uint32_t b) { return before(own, a, b); });
        const float top = own[order[0]];
        const auto weight = [&](uint32_t expert) { return std::exp(own[expert] - top); };
        float total = 0.0f;
        if (shape.normalize) {
            for (uint32_t slot = 0; slot < shape.top_k; ++slot) total += weight(order[slot]);
        } else {
            for (uint32_t expert = 0; expert < shape.experts; ++expert) total += weight(expert);
        }
        float* target = result.routing.data() + size_t{row} * (shape.top_k + slots);
        for (uint32_t slot = 0; slot < shape.top_k; ++slot) {
            const uint32_t expert = order[slot];
            target[slot] = weight(expert) / total;
            target[shape.top_k + slot] = static_cast<float>(expert);
            entries[expert].push_back(row * slots + slot);
        }
        if (shape.shared) target[2 * shape.top_k] = 1.0f / (1.0f + std::exp(-all[shape.experts]));
    }
    // The shared expert's blocks come first, its entries last.
    const auto add_blocks = [&](uint32_t expert, uint32_t first, uint32_t rows) {
        for (uint32_t at = 0; at < rows; at += shape.tile)
            result.blocks.push_back({expert, first + at, std::min(shape.tile, rows - at), 0});
    };
    if (shape.shared) add_blocks(shape.experts, shape.rows * shape.top_k, shape.rows);
    for (uint32_t expert = 0; expert < shape.experts; ++expert) {
        const std::vector<uint32_t>& own = entries[expert];
        add_blocks(expert, static_cast<uint32_t>(result.entries.size()), static_cast<uint32_t>(own.size()));
        result.entries.insert(result.entries.end(), own.begin(), own.end());
    }
    for (uint32_t row = 0; shape.shared && row < shape.rows; ++row)
        result.entries.push_back(row * slots + shape.top_k);
    result.blocks.resize(shape.capacity);
    return result;
}

}  // namespace lily::metal
