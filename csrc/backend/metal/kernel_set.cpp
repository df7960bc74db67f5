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

void append(std::vector<KernelSource>& sources, std::string_view name) {
    const std::vector<KernelSource> more = chosen(std::span(&name, 1));
    sources.insert(sources.end(), more.begin(), more.end());
}

}  // namespace

KernelSet::KernelSet(Device& device, std::string activation, MatrixPath path)
    : device_(device),
      activation_(std::move(activation)),
      path_(path),
      with_weights_(chosen(kWithWeights)),
      without_weights_(chosen(kWithoutWeights)) {
    if (path != MatrixPath::simdgroup) append(with_weights_, "matrix_tensor");
    if (path == MatrixPath::tensor_fragments) append(without_weights_, "attention_tensor");
    common_ = std::make_unique<Kernels>(device, macros(), without_weights_);
}

Kernels& KernelSet::of(const NumberFormat& format) {
    std::unique_ptr<Kernels>& kernels = by_format_[format];
    if (!kernels) {
        Kernels::Macros with_format = macros();
        with_format.emplace_back("LILY_FORMAT", format.name);
        with_format.emplace_back("LILY_SCALE", format.scale);
        if (path_ == MatrixPath::tensor_tiles) with_format.emplace_back("LILY_TENSOR_TILES", "1");
        kernels = std::make_unique<Kernels>(device_, std::move(with_format), with_weights_);
    }
    return *kernels;
}

void KernelSet::require_all() {
    std::vector<Kernels*> all{common_.get()};
    for (const auto& [format, kernels] : by_format_) all.push_back(kernels.get());
    for (Kernels* kernels : all) {
        for (const auto& [family, reason] : kernels->failures()) {
            if (family.ends_with("_tensor")) continue;
            throw BackendError("the Metal kernels of '" + family + "' don't compile: " + reason);
        }
    }
}

}  // namespace lily::metal
