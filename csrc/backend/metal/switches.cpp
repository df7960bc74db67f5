#include "backend/metal/switches.h"

#include "backend/ablation.h"

namespace lily::metal {
namespace {

constexpr Technique<Switches> kTechniques[] = {
    {"row_parallel_products", &Switches::row_parallel_products},
    {"fused_norms", &Switches::fused_norms},
    {"fused_adds", &Switches::fused_adds},
    {"fused_gate_up", &Switches::fused_gate_up},
    {"fused_down", &Switches::fused_down},
    {"fused_rotary", &Switches::fused_rotary},
    {"fused_delta_norm", &Switches::fused_delta_norm},
    {"gqa_packing", &Switches::gqa_packing},
    {"coalesced_cache_reads", &Switches::coalesced_cache_reads},
    {"long_context_blocks", &Switches::long_context_blocks},
    {"concurrent_pass", &Switches::concurrent_pass},
    {"token_handoff", &Switches::token_handoff},
    {"bf16_activations", &Switches::bf16_activations},
    {"matrix_prefill", &Switches::matrix_prefill},
    {"compressed_weights", &Switches::compressed_weights},
    {"gpu_routing", &Switches::gpu_routing},
    {"fitted_tiles", &Switches::fitted_tiles},
    {"chunked_prefill", &Switches::chunked_prefill},
    {"register_scan", &Switches::register_scan},
    {"tensor_operations", &Switches::tensor_operations},
    {"tensor_fragments", &Switches::tensor_fragments},
};

}  // namespace

Switches::Switches(const std::set<std::string>& ablate) {
    switch_off<Switches>(*this, kTechniques, ablate, "Metal");
}

uint32_t Switches::splits(int64_t length) const {
    const int64_t pages = length < medium_from() ? 1 : length < long_from() ? 4 : 16;
    return static_cast<uint32_t>((length + 64 * pages - 1) / (64 * pages));
}

}  // namespace lily::metal
