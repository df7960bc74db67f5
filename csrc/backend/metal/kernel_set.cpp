#include "backend/metal/kernel_set.h"

#include <array>
#include <utility>

#include "base/error.h"

namespace lily::metal {
namespace {

constexpr std::array<std::string_view, 5> kWithWeights = {"project", "experts", "head", "combine",
                                                          "matrix_simdgroup"};
constexpr std::array<std::string_view, 6> kWithoutWeights = {
    "attention", "delta_rule", "routing", "delta_rule_scan", "attention_prefill", "sample"};
constexpr std::array<std::string_view, 2> kUnfused = {"unfused_project", "unfused_experts"};

// Files with kernels of the same names, bindings and parameters, in whose place one is taken if a technique
// is switched off.
struct Replacement {
    std::string_view name, by;
    bool Switches::* technique;
};
constexpr Replacement kReplacements[] = {
    {"attention", "strided_attention", &Switches::coalesced_cache_reads},
    {"delta_rule", "raw_delta_rule", &Switches::fused_delta_norm},
    {"project", "one_row_project", &Switches::row_parallel_products},
    {"experts", "one_row_experts", &Switches::row_parallel_products},
    {"head", "one_row_head", &Switches::row_parallel_products},
    {"combine", "one_row_combine", &Switches::row_parallel_products},
    {"matrix_simdgroup", "whole_tiles", &Switches::fitted_tiles},
};

std::string_view file_of(std::string_view name, const Switches& switches) {
    for (const Replacement& r : kReplacements) {
        if (r.name == name && !(switches.*r.technique)) return r.by;
    }
    return name;
}

// The sources of libraries of these names.
std::vector<KernelSource> chosen(std::span<const std::string_view> names, const Switches& switches) {
    std::vector<KernelSource> sources;
    for (const std::string_view name : names) {
        const std::string_view file = file_of(name, switches);
        KernelSource source = *std::ranges::find(embedded_kernels(), file, &KernelSource::name);
        source.name = name;
        sources.push_back(source);
    }
    return sources;
}

}  // namespace

KernelSet::KernelSet(Device& device, const Switches& switches, MatrixPath path)
    : device_(device),
      macros_{{"LILY_ACTIVATION", switches.bf16_activations ? "bfloat" : "float"}},
      path_(path),
      one_row_(!switches.row_parallel_products) {
    std::vector<std::string_view> with_weights(kWithWeights.begin(), kWithWeights.end());
    std::vector<std::string_view> without_weights(kWithoutWeights.begin(), kWithoutWeights.end());
    if (path != MatrixPath::simdgroup) with_weights.push_back("matrix_tensor");
    if (!switches.compressed_weights) with_weights.push_back("expand_weights");
    if (path == MatrixPath::tensor_fragments) without_weights.push_back("attention_tensor");
    if (!switches.fused_rotary) without_weights.push_back("unfused_attention");
    with_weights_ = chosen(with_weights, switches);
    unfused_ = chosen(kUnfused, switches);
    without_weights_ = chosen(without_weights, switches);
    common_ = std::make_unique<Kernels>(device, macros_, without_weights_);
}

Kernels& KernelSet::of(const NumberFormat& format) {
    std::unique_ptr<Kernels>& kernels = by_format_[format];
    if (!kernels) {
        Kernels::Macros macros = with_format(format);
        if (path_ == MatrixPath::tensor_tiles) macros.emplace_back("LILY_TENSOR_TILES", "1");
        kernels = std::make_unique<Kernels>(device_, std::move(macros), with_weights_);
    }
    return *kernels;
}

Kernels& KernelSet::unfused(const NumberFormat& format) {
    std::unique_ptr<Kernels>& kernels = unfused_by_format_[format];
    if (!kernels) {
        Kernels::Macros macros = with_format(format);
        if (one_row_) macros.emplace_back("LILY_ONE_ROW", "1");
        kernels = std::make_unique<Kernels>(device_, std::move(macros), unfused_);
    }
    return *kernels;
}

Kernels::Macros KernelSet::with_format(const NumberFormat& format) const {
    Kernels::Macros macros = macros_;
    macros.emplace_back("LILY_FORMAT", format.name);
    macros.emplace_back("LILY_SCALE", format.scale);
    return macros;
}

void KernelSet::require_all() {
    std::vector<Kernels*> all{common_.get()};
    for (const auto& [format, kernels] : by_format_) all.push_back(kernels.get());
    for (const auto& [format, kernels] : unfused_by_format_) all.push_back(kernels.get());
    for (Kernels* kernels : all) {
        for (const auto& [family, reason] : kernels->failures()) {
            if (family.ends_with("_tensor")) continue;
            throw BackendError("the Metal kernels of '" + family + "' don't compile: " + reason);
        }
    }
}

}  // namespace lily::metal
