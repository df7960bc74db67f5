// Routing of many rows on the host: what metal/routing.metal does, step by step. Without `gpu_routing`, and
// as a second reference.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace lily::metal {

// The structure of routing.metal.
struct RoutingShape {
    uint32_t rows, experts, top_k, normalize, shared, tile, capacity;
};

struct HostRouting {
    std::vector<float> routing;                   // [rows, 2 top_k + shared]: weights | experts | shared gate
    std::vector<uint32_t> entries;                // [rows (top_k + shared)]: row * slots + slot, by expert
    std::vector<std::array<uint32_t, 4>> blocks;  // [capacity]: expert, first entry, rows, 0
};

// `logits` are [rows, experts + shared].
HostRouting route_on_host(const RoutingShape& shape, std::span<const float> logits);

}  // namespace lily::metal
