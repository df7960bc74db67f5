// Launches of metal/delta_rule.metal: one for each sequence.
#include <bit>

#include "backend/metal/state.h"
#include "backend/metal/step.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr uint32_t kColumns = 16;  // of the state, per threadgroup
constexpr uint32_t kThreads = 128, kNormThreads = 32;
constexpr float kUnitEps = 1e-6f;  // of the length of q and k, part of the architecture
constexpr int64_t kMostHeads = 64;

struct DeltaParameters {
    uint32_t rows, key_heads, value_heads, value_dim, conv_width, stride;
    float eps;
};

struct GatedNormShape {
    uint32_t heads, dim, stride, gates;
    float eps;
};

void require_shape(const DeltaShape& s) {
    if (s.key_dim != 32 && s.key_dim != 64 && s.key_dim != 128) {
        throw BackendError("linear_key_head_dim is " + std::to_string(s.key_dim) +
                           "; the Metal backend has kernels for 32, 64 and 128");
    }
    if (s.value_dim < 16 || !std::has_single_bit(static_cast<uint64_t>(s.value_dim))) {
        throw BackendError("linear_value_head_dim is " + std::to_string(s.value_dim) +
                           "; the Metal backend has kernels for powers of two from 16");
    }
    if (s.value_heads > kMostHeads) {
        throw BackendError("linear_num_value_heads is " + std::to_string(s.value_heads) +
                           "; the Metal backend has kernels for up to 64");
    }
    if (s.conv_width < 2 || s.conv_width > 4) {
        throw BackendError("linear_conv_kernel_dim is " + std::to_string(s.conv_width) +
                           "; the Metal backend has kernels for 2, 3 and 4");
    }
}

std::string kernel_name(const DeltaShape& s) {
    require_shape(s);
    return "delta_rule_k" + std::to_string(s.key_dim / 32);
}

class DeltaRuleStep final : public Step {
  public:
    DeltaRuleStep(const DeltaRule& op, Builder& b)
        : in_(op.in),
          out_(op.out),
          shape_(op.shape),
          state_(op.state),
          layout_(b.recurrent),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          fused_norm_(b.switches.fused_delta_norm),
          eps_(op.eps),
          slices_(static_cast<uint32_t>(op.shape.value_dim) / kColumns),
          conv_(b.weights.vector(*op.conv)),
          a_log_(b.weights.vector(*op.a_log)),
          dt_bias_(b.weights.vector(*op.dt_bias)),
          norm_(b.weights.vector(*op.norm)),
          one_(b.kernels.common(), "delta_rule", kernel_name(op.shape) + "_m1"),
          many_(b.kernels.common(), "delta_rule", kernel_name(op.shape) + "_m8"),
          gated_norm_(b.kernels.common(), "delta_rule", "gated_norm") {
        b.sizes.at_least(&Sizes::squares, shape_.value_heads * slices_);
        if (!fused_norm_) b.sizes.at_least(&Sizes::scratch, shape_.values());
    }

    void encode(const Block& block, Pass& pass) const override {
        const auto in_stride = static_cast<size_t>(shape_.projected());
        const auto values = static_cast<size_t>(shape_.values());
        const Placed& out = buffers_.activations[size_t(out_)];
        const Placed result = fused_norm_ ? out : Placed{&buffers_.scratch, 0, buffers_.scratch.size()};
        for (const Part& part : block.parts) {
            const size_t squares = static_cast<size_t>(shape_.value_heads) * slices_;
            const auto rows_of = [&](const auto& buffer, size_t width, size_t bytes) {
                return elements(buffer, part.first_row * width, part.rows * width, bytes);
            };
            const auto matrices = [&](const DeviceBuffer& state) {
                return Range(state, static_cast<size_t>(layout_.matrices_offset(state_)),
                             static_cast<size_t>(layout_.matrix_bytes()));
            };
            const Range history(*part.history, static_cast<size_t>(layout_.conv_offset(state_)),
                                static_cast<size_t>(layout_.conv_bytes()));
            const DeltaParameters parameters{part.rows,
                                             static_cast<uint32_t>(shape_.key_heads),
                                             static_cast<uint32_t>(shape_.value_heads),
                                             static_cast<uint32_t>(shape_.value_dim),
                                             static_cast<uint32_t>(shape_.conv_width),
                                             static_cast<uint32_t>(in_stride),
                                             kUnitEps};
            pass.launch(
                part.rows == 1 ? one_() : many_(),
                {reads(rows_of(buffers_.activations[size_t(in_)], in_stride, element_)), reads(*conv_),
                 reads(*a_log_), reads(*dt_bias_), reads(*norm_), updates(history),
                 reads(matrices(*part.state)), writes(rows_of(result, values, element_)),
                 writes(rows_of(buffers_.squares, squares, 4)),
                 reads(Range(*block.positions->buffer, block.positions->offset + 4 * part.first_row, 4)),
                 constant(parameters), writes(matrices(*part.next_state))},
                {slices_, static_cast<uint32_t>(shape_.value_heads)}, {kThreads});
        }
        if (fused_norm_) return;
        const size_t rows = block.rows;
        const auto heads = static_cast<uint32_t>(shape_.value_heads);
        const GatedNormShape shape{heads, static_cast<uint32_t>(shape_.value_dim),
                                   static_cast<uint32_t>(in_stride), static_cast<uint32_t>(shape_.channels()),
                                   eps_};
        pass.launch(gated_norm_(),
                    {reads(elements(result, 0, rows * values, element_)),
                     reads(elements(buffers_.activations[size_t(in_)], 0, rows * in_stride, element_)),
                     reads(*norm_), writes(elements(out, 0, rows * values, element_)), constant(shape)},
                    {heads, block.rows}, {kNormThreads});
    }

  private:
    Activation in_, out_;
    DeltaShape shape_;
    int64_t state_;
    RecurrentLayout layout_;
    const Buffers& buffers_;
    size_t element_;
    bool fused_norm_;  // off: the kernels of raw_delta_rule.metal
    float eps_;
    uint32_t slices_;
    const Placed *conv_, *a_log_, *dt_bias_, *norm_;
    OneKernel one_, many_, gated_norm_;
};

}  // namespace

std::unique_ptr<Step> make_step(const DeltaRule& op, Builder& b) {
    auto step = std::make_unique<DeltaRuleStep>(op, b);
    b.unfinished.erase(op.out);
    if (!b.switches.fused_delta_norm) return step;
    b.unfinished[op.out] = {
        static_cast<uint32_t>(op.shape.value_heads),
        static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(op.shape.value_dim))),
        static_cast<uint32_t>(op.shape.value_dim) / kColumns, op.eps};
    return step;
}

}  // namespace lily::metal
