// Launches of metal/delta_rule_scan.metal.
#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "delta_rule_scan";
constexpr float kUnitEps = 1e-6f;  // of the length of q and k, part of the architecture
constexpr uint32_t kThreads = 128;
constexpr uint32_t kSimdgroups = 4;
constexpr uint32_t kPrepareRows = 32;
constexpr uint32_t kScanColumns = 16, kBlockColumns = 32;  // of the state, per threadgroup

struct DeltaRowsShape {
    uint32_t rows, key_heads, value_heads, value_dim, channels, stride;
    float eps;
};

class DeltaRuleRows final : public Step {
  public:
    DeltaRuleRows(const DeltaRule& op, Builder& b)
        : in_(op.in),
          out_(op.out),
          shape_(op.shape),
          state_(op.state),
          eps_(op.eps),
          layout_(b.recurrent),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          columns_(b.switches.register_scan ? kScanColumns : kBlockColumns),
          conv_(b.weights.vector(*op.conv)),
          a_log_(b.weights.vector(*op.a_log)),
          dt_bias_(b.weights.vector(*op.dt_bias)),
          norm_(b.weights.vector(*op.norm)),
          prepare_(b.kernels.common(), kFamily,
                   "delta_prepare_k" + keys() + "_c" + std::to_string(op.shape.conv_width)),
          recur_(b.kernels.common(), kFamily,
                 (b.switches.register_scan ? "delta_scan_k" : "delta_blocks_k") + keys()),
          gate_(b.kernels.common(), kFamily, "gated_norm_rows") {
        b.sizes.at_least(&Sizes::mixed, shape_.channels());
        b.sizes.at_least(&Sizes::gates, 2 * shape_.value_heads + shape_.key_heads);
    }

    void encode(const Block& block, Pass& pass) const override {
        const DeviceBuffer& state = *block.parts.at(0).state;
        const uint32_t rows = block.rows;
        const auto rows_of = [&](const Placed& buffer, int64_t width, size_t bytes) {
            return elements(buffer, 0, rows * static_cast<size_t>(width), bytes);
        };
        const Range projected = rows_of(buffers_.activations[size_t(in_)], shape_.projected(), element_);
        const Range mixed = rows_of(buffers_.mixed, shape_.channels(), element_);
        const Range gates = rows_of(buffers_.gates, 2 * shape_.value_heads + shape_.key_heads, 4);
        const Range out = rows_of(buffers_.activations[size_t(out_)], shape_.values(), element_);
        const Range history(*block.parts.at(0).history, static_cast<size_t>(layout_.conv_offset(state_)),
                            static_cast<size_t>(layout_.conv_bytes()));
        const Range matrices(state, static_cast<size_t>(layout_.matrices_offset(state_)),
                             static_cast<size_t>(layout_.matrix_bytes()));
        const auto heads = static_cast<uint32_t>(shape_.value_heads);
        const auto units =
            static_cast<uint32_t>(shape_.key_heads) +
            divided(static_cast<uint64_t>(shape_.values()), static_cast<uint64_t>(shape_.key_dim)) + 1;
        pass.launch(
            prepare_(),
            {reads(projected), reads(*conv_), reads(*a_log_), reads(*dt_bias_), updates(history),
             writes(mixed), writes(gates), reads(Range(*block.positions->buffer, block.positions->offset, 4)),
             constant(structure(rows, kUnitEps))},
            {divided(units, kSimdgroups), divided(rows, kPrepareRows)}, {kThreads});
        pass.launch(
            recur_(),
            {reads(mixed), reads(gates), updates(matrices), writes(out), constant(structure(rows, kUnitEps))},
            {divided(static_cast<uint64_t>(shape_.value_dim), columns_), heads}, {kThreads},
            {.multiply_adds = uint64_t{rows} * 3 * matrices.bytes / 4});
        pass.launch(gate_(), {updates(out), reads(projected), reads(*norm_), constant(structure(rows, eps_))},
                    {divided(heads, kSimdgroups), rows}, {kThreads}, {.read = 2 * out.bytes});
    }

  private:
    std::string keys() const { return std::to_string(shape_.key_dim / 32); }
    DeltaRowsShape structure(uint32_t rows, float eps) const {
        return {rows,
                static_cast<uint32_t>(shape_.key_heads),
                static_cast<uint32_t>(shape_.value_heads),
                static_cast<uint32_t>(shape_.value_dim),
                static_cast<uint32_t>(shape_.channels()),
                static_cast<uint32_t>(shape_.projected()),
                eps};
    }

    Activation in_, out_;
    DeltaShape shape_;
    int64_t state_;
    float eps_;
    RecurrentLayout layout_;
    const Buffers& buffers_;
    size_t element_;
    uint32_t columns_;
    const Placed *conv_, *a_log_, *dt_bias_, *norm_;
    OneKernel prepare_, recur_, gate_;
};

}  // namespace

std::unique_ptr<Step> make_rows_step(const DeltaRule& op, Builder& b) {
    return std::make_unique<DeltaRuleRows>(op, b);
}

}  // namespace lily::metal
