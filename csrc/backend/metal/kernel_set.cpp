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

std::vector<KernelSource> chosen(std::span<const std::string_view> names) {
    std::vector<KernelSource> sources;
    for (const KernelSource& source : embedded_kernels()) {
        if (std::ranges::find(names, source.name) != names.end()) sources.push_back(source);
    }
    return sources;
}

}  // namespace

KernelSet::KernelSet(Device& device, std::string activation)
    : device_(device),
      activation_(std::move(activation)),
      with_weights_(chosen(kWithWeights)),
      without_weights_(chosen(kWithoutWeights)),
      common_(std::make_unique<Kernels>(device, macros(), without_weights_)) {}

Kernels& KernelSet::of(const NumberFormat& format) {
    std::unique_ptr<Kernels>& kernels = by_format_[format];
    if (!kernels) {
        Kernels::Macros with_format = macros();
        with_format.emplace_back("LILY_FORMAT", format.name);
        with_format.emplace_back("LILY_SCALE", format.scale);
        kernels = std::make_unique<Kernels>(device_, std::move(with_format), with_weights_);
    }
    return *kernels;
}

void KernelSet::require_all() {
    std::vector<Kernels*> all{common_.get()};
    for (const auto& [format, kernels] : by_format_) all.push_back(kernels.get());
    for (Kernels* kernels : all) {
        for (const auto& [family, reason] : kernels->failures()) {
            throw BackendError("the Metal kernels of '" + family + "' don't compile: " + reason);
        }
    }
}

}  // namespace lily::metal
