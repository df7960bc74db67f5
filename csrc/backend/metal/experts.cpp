// Launches of metal/experts.metal.
#include "backend/metal/unfused.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr int64_t kMostExperts = 512;
constexpr int64_t kMostTopK = 32;

struct RouteParameters {
    uint32_t rows, cols, outputs, out_stride, group_shift;
    float eps;
    uint32_t write_normed;
};

struct ExpertParameters {
    uint32_t experts, top_k, normalize, shared, first_slot, slots, width, shared_width, stride, all_slots,
        hidden, group_shift, shared_group_shift;
};

void require_shape(const ExpertShape& s) {
    if (s.experts > kMostExperts || s.top_k > kMostTopK) {
        throw BackendError("the model chooses " + std::to_string(s.top_k) + " of " +
                           std::to_string(s.experts) +
                           " experts; the Metal backend has kernels for up to 32 of 512");
    }
}

class RouteStep final : public Step {
  public:
    RouteStep(const Route& op, Builder& b)
        : in_(op.in),
          normed_(op.normed),
          eps_(op.eps),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          outputs_(b.switches.outputs()),
          gain_(b.weights.vector(*op.norm)) {
        require_shape(op.shape);
        std::vector<Matrix> matrices{op.router};
        matrices.insert(matrices.end(), op.shared_gate.begin(), op.shared_gate.end());
        for (const DeviceMatrix* w : b.weights.stack_by_format(matrices)) {
            parts_.push_back({w, width_, {b.kernels.of(w->format), "experts", "route_" + w->format.name}});
            if (!b.switches.fused_norms) products_.emplace_back(w, Product::Result::floats, b);
            width_ += w->rows;
        }
        if (!b.switches.fused_norms) norm_.emplace(in_, gain_, eps_, *parts_[0].weights, b);
        b.sizes.at_least(&Sizes::router_logits, width_);
    }

    // Router and shared gate of different formats are launches of their own, into columns of the same rows.
    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const uint32_t cols = parts_[0].weights->cols;
        const Range normed = elements(buffers_.activations[size_t(normed_)], 0, rows * cols, element_);
        if (norm_) norm_->encode(normed, block.rows, pass);
        for (size_t i = 0; i < parts_.size(); ++i) {
            const ColumnPart& part = parts_[i];
            const DeviceMatrix& w = *part.weights;
            const Range logits = elements(buffers_.router_logits, part.first, (rows - 1) * width_ + w.rows);
            if (norm_) {
                products_[i].encode(normed, logits, width_, block.rows, pass);
                continue;
            }
            pass.launch(part.kernels(block.rows),
                        {reads(w.codes), reads(w.scales), reads(w.biases),
                         reads(elements(buffers_.activations[size_t(in_)], 0, rows * cols)), reads(*gain_),
                         writes(logits), i == 0 ? writes(normed) : unused(*normed.buffer),
                         constant(RouteParameters{block.rows, cols, w.rows, width_, w.group_shift, eps_,
                                                  i == 0 ? 1u : 0u})},
                        {divided(w.rows, outputs_.route(block.rows))}, {kProjectThreads});
        }
    }

  private:
    struct ColumnPart {
        const DeviceMatrix* weights;
        uint32_t first;
        RowKernels kernels;
    };
    Activation in_, normed_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
    Outputs outputs_;
    const Placed* gain_;
    uint32_t width_ = 0;  // of a row of logits
    std::vector<ColumnPart> parts_;
    // Without the norm in them:
    std::optional<NormRows> norm_;
    std::vector<Product> products_;
};

// The experts of one direction: routed and shared, in one launch or two; without `shared` only the routed
// ones.
class ExpertStep : public Step {
  protected:
    struct Launch {
        const DeviceMatrix* routed;
        const DeviceMatrix* shared;
        OneKernel kernel;
        ExpertParameters parameters;
        uint64_t work;  // bytes of weights for a row
    };

    ExpertStep(const ExpertShape& shape, int64_t hidden, const char* kernel, const DeviceMatrix* routed,
               const DeviceMatrix* shared, Builder& b)
        : shape_(shape),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          outputs_(b.switches.outputs()) {
        require_shape(shape);
        const auto top_k = static_cast<uint32_t>(shape.top_k);
        const auto add = [&](const DeviceMatrix* matrix, uint32_t first, uint32_t slots, uint64_t work) {
            launches_.push_back(
                {routed,
                 shared ? shared : routed,
                 OneKernel(b.kernels.of(matrix->format), "experts",
                           std::string(kernel) + "_" + matrix->format.name),
                 {static_cast<uint32_t>(shape.experts), top_k, shape.normalize ? 1u : 0u,
                  shape.shared_width > 0 ? 1u : 0u, first, slots, static_cast<uint32_t>(shape.width),
                  static_cast<uint32_t>(shape.shared_width),
                  static_cast<uint32_t>(std::max(shape.width, shape.shared_width)),
                  static_cast<uint32_t>(shape.slots()), static_cast<uint32_t>(hidden), routed->group_shift,
                  shared ? shared->group_shift : 5},
                 work});
        };
        const uint64_t routed_work = top_k * routed->matrix_bytes;
        if (!shared) {
            add(routed, 0, top_k, routed_work);
        } else if (shared->format == routed->format) {
            add(routed, 0, top_k + 1, routed_work + shared->matrix_bytes);
        } else {
            add(routed, 0, top_k, routed_work);
            add(shared, top_k, 1, shared->matrix_bytes);
        }
    }

    // Columns of a row of the activation between up and down.
    size_t row_width() const {
        return static_cast<size_t>(shape_.slots() * std::max(shape_.width, shape_.shared_width));
    }
    size_t routing_width() const { return static_cast<size_t>(shape_.top_k + shape_.slots()); }

    ExpertShape shape_;
    const Buffers& buffers_;
    size_t element_;
    Outputs outputs_;
    std::vector<Launch> launches_;
};

class ExpertsUpStep final : public ExpertStep {
  public:
    ExpertsUpStep(const ExpertsUp& op, Builder& b)
        : ExpertStep(op.shape, op.gate[0].cols, "experts_up",
                     b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.gate, &op.up}),
                     shared_fuses(op) ? b.weights.stack_lists({&op.shared_gate, &op.shared_up}) : nullptr, b),
          in_(op.in),
          out_(op.out),
          routing_(op.routing),
          shared_(shared_fuses(op) ? nullptr : make_unfused_step(op, false, b)) {}

    static bool shared_fuses(const ExpertsUp& op) {
        return op.shared_gate.empty() || Weights::same_format(op.shared_gate[0], op.shared_up[0]);
    }

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const size_t hidden = launches_[0].parameters.hidden;
        const size_t columns = static_cast<size_t>(shape_.experts + (shape_.slots() - shape_.top_k));
        const Range in = elements(buffers_.activations[size_t(in_)], 0, rows * hidden, element_);
        const Range logits = elements(buffers_.router_logits, 0, rows * columns);
        for (const Launch& l : launches_) {
            const bool routes = l.parameters.first_slot == 0;  // the first launch writes the routing
            const Range routing = elements(buffers_.activations[size_t(routing_)], 0, rows * routing_width());
            const Range out = elements(buffers_.activations[size_t(out_)], 0, rows * row_width(), element_);
            const bool both = l.parameters.slots > l.parameters.top_k;
            const uint32_t width =
                std::max(routes ? l.parameters.width : 0, both || !routes ? l.parameters.shared_width : 0);
            pass.launch(l.kernel(),
                        {reads(l.routed->codes), reads(l.routed->scales), reads(l.routed->biases),
                         reads(l.shared->codes), reads(l.shared->scales), reads(l.shared->biases), reads(in),
                         reads(logits), writes(out), routes ? writes(routing) : unused(*routing.buffer),
                         constant(l.parameters)},
                        {divided(width, outputs_.pieces()), l.parameters.slots, block.rows},
                        {kProjectThreads}, {.read = rows * l.work + in.bytes + logits.bytes});
        }
        if (shared_) shared_->encode(block, pass);
    }

  private:
    Activation in_, out_, routing_;
    std::unique_ptr<Step> shared_;  // the shared expert, if its gate and up differ in format
};

class ExpertsDownStep final : public ExpertStep {
  public:
    ExpertsDownStep(const ExpertsDown& op, Builder& b)
        : ExpertStep(op.shape, op.down[0].rows, "experts_down",
                     b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.down}),
                     b.weights.stack_lists({&op.shared_down}), b),
          in_(op.in),
          residual_(op.residual),
          routing_(op.routing) {}

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const size_t hidden = launches_[0].parameters.hidden;
        const Range in = elements(buffers_.activations[size_t(in_)], 0, rows * row_width(), element_);
        const Range routing = elements(buffers_.activations[size_t(routing_)], 0, rows * routing_width());
        const Range sum = elements(buffers_.activations[size_t(residual_)], 0, rows * hidden);
        for (const Launch& l : launches_) {
            pass.launch(l.kernel(),
                        {reads(l.routed->codes), reads(l.routed->scales), reads(l.routed->biases),
                         reads(l.shared->codes), reads(l.shared->scales), reads(l.shared->biases), reads(in),
                         reads(routing), updates(sum), constant(l.parameters)},
                        {divided(hidden, outputs_.add()), 1, block.rows}, {kAddThreads},
                        {.read = rows * l.work + in.bytes + routing.bytes + sum.bytes});
        }
    }

  private:
    Activation in_, residual_, routing_;
};

}  // namespace

std::unique_ptr<Step> make_step(const Route& op, Builder& b) { return std::make_unique<RouteStep>(op, b); }

std::unique_ptr<Step> make_step(const ExpertsUp& op, Builder& b) {
    b.unfinished.erase(op.out);
    require_shape(op.shape);
    const bool fuses = b.switches.fused_gate_up && Weights::same_format(op.gate[0], op.up[0]);
    if (!fuses) return make_unfused_step(op, true, b);
    return std::make_unique<ExpertsUpStep>(op, b);
}

std::unique_ptr<Step> make_step(const ExpertsDown& op, Builder& b) {
    if (!b.switches.fused_down) return make_unfused_step(op, b);
    return std::make_unique<ExpertsDownStep>(op, b);
}

}  // namespace lily::metal
