// Launches of metal/ablation/expand_weights.metal.
#include "backend/metal/operand.h"

namespace lily::metal {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint64_t kGroupWeights = 8192;  // of a threadgroup
constexpr size_t kAlignment = 256;

bool is_plain(const NumberFormat& format) {
    return format.name == "b16" || format.name == "f16" || format.name == "f32";
}

// The structure of expand_weights.
struct ExpandShape {
    uint32_t rows, cols, group_shift;
};

}  // namespace

Operand::Operand(const DeviceMatrix* weights, uint64_t count, size_t offset, Builder& b)
    : weights_(weights),
      count_(count),
      offset_((offset + kAlignment - 1) / kAlignment * kAlignment),
      buffers_(b.buffers) {
    if (b.switches.compressed_weights || is_plain(weights->format)) return;
    bytes_ = count * weights->rows * weights->cols * b.switches.activation_bytes();
    expanded_ = NumberFormat{b.switches.bf16_activations ? "b16" : "f32", "bfloat"};
    expand_.emplace(b.kernels.of(weights->format), "expand_weights",
                    "expand_weights_" + weights->format.name);
    b.sizes.at_least(&Sizes::expanded, static_cast<int64_t>(end()));
}

void Operand::expand(Pass& pass) const {
    if (!expanded_) return;
    const DeviceMatrix& w = *weights_;
    const auto rows = static_cast<uint32_t>(count_ * w.rows);
    pass.launch((*expand_)(),
                {reads(w.codes), reads(w.scales), reads(w.biases),
                 writes(elements(buffers_.expanded, offset_, bytes_, 1)),
                 constant(ExpandShape{rows, w.cols, w.group_shift})},
                {divided(uint64_t{rows} * w.cols, kGroupWeights)}, {kThreads});
}

std::array<Argument, 3> Operand::arguments() const {
    const DeviceMatrix& w = *weights_;
    if (!expanded_) return {reads(w.codes), reads(w.scales), reads(w.biases)};
    const DeviceBuffer& buffer = *buffers_.expanded.buffer;
    return {reads(elements(buffers_.expanded, offset_, bytes_, 1)), unused(buffer), unused(buffer)};
}

}  // namespace lily::metal
