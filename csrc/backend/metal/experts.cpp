// Launches of metal/experts.metal.
#include "backend/metal/step.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr int64_t kMostExperts = 512;
constexpr int64_t kMostTopK = 32;

struct RouteParameters {
    uint32_t rows, cols, outputs, group_shift;
    float eps;
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
          gain_(b.weights.vector(*op.norm)) {
        require_shape(op.shape);
        std::vector<Matrix> matrices{op.router};
        matrices.insert(matrices.end(), op.shared_gate.begin(), op.shared_gate.end());
        outputs_ = static_cast<uint32_t>(op.shape.experts) + (op.shared_gate.empty() ? 0 : 1);
        const bool together = matrices.size() == 1 || Weights::same_format(matrices[0], matrices[1]);
        if (together) {
            add(b, matrices);
        } else {
            for (const Matrix& matrix : matrices) add(b, {&matrix, 1});
        }
        b.sizes.at_least(&Sizes::router_logits, outputs_);
    }

    // Router and shared gate of different formats are launches of their own, one row at a time: the kernel
    // knows no distance between rows other than its outputs.
    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows_each = parts_.size() == 1 ? block.rows : 1;
        for (uint32_t row = 0; row < block.rows; row += rows_each) {
            uint32_t column = 0;
            for (const auto& [weights, kernels] : parts_) {
                launch(pass, *weights, kernels(rows_each), row, rows_each, column);
                column += weights->rows;
            }
        }
    }

  private:
    void add(Builder& b, std::span<const Matrix> matrices) {
        const DeviceMatrix* w = b.weights.stack(matrices);
        parts_.emplace_back(w, RowKernels(b.kernels.of(w->format), "experts", "route_" + w->format.name));
    }

    void launch(Pass& pass, const DeviceMatrix& w, const Kernel& kernel, size_t row, uint32_t rows,
                uint32_t column) const {
        pass.launch(kernel,
                    {reads(w.codes), reads(w.scales), reads(w.biases),
                     reads(elements(buffers_.activations[size_t(in_)], row * w.cols, size_t{rows} * w.cols)),
                     reads(*gain_),
                     writes(elements(buffers_.router_logits, row * outputs_ + column, size_t{rows} * w.rows)),
                     writes(elements(buffers_.activations[size_t(normed_)], row * w.cols,
                                     size_t{rows} * w.cols, element_)),
                     constant(RouteParameters{rows, w.cols, w.rows, w.group_shift, eps_})},
                    {divided(w.rows, weight_rows(kRouteWanted, row_room(rows)))}, {kProjectThreads});
    }

    Activation in_, normed_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
    const Placed* gain_;
    uint32_t outputs_;
    std::vector<std::pair<const DeviceMatrix*, RowKernels>> parts_;
};

// The experts of one direction: routed and shared, in one launch or two.
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
        : shape_(shape), buffers_(b.buffers), element_(b.switches.activation_bytes()) {
        require_shape(shape);
        const auto top_k = static_cast<uint32_t>(shape.top_k);
        const auto add = [&](const DeviceMatrix* matrix, uint32_t first, uint32_t slots, uint64_t work) {
            launches_.push_back(
                {routed,
                 shared ? shared : routed,
                 OneKernel(b.kernels.of(matrix->format), "experts",
                           std::string(kernel) + "_" + matrix->format.name),
                 {static_cast<uint32_t>(shape.experts), top_k, shape.normalize ? 1u : 0u, shared ? 1u : 0u,
                  first, slots, static_cast<uint32_t>(shape.width), static_cast<uint32_t>(shape.shared_width),
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
    std::vector<Launch> launches_;
};

class ExpertsUpStep final : public ExpertStep {
  public:
    ExpertsUpStep(const ExpertsUp& op, Builder& b)
        : ExpertStep(op.shape, op.gate[0].cols, "experts_up",
                     b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.gate, &op.up}),
                     b.weights.stack_lists({&op.shared_gate, &op.shared_up}), b),
          in_(op.in),
          out_(op.out),
          routing_(op.routing) {}

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const size_t hidden = launches_[0].parameters.hidden;
        const size_t logits = static_cast<size_t>(shape_.experts + (shape_.slots() - shape_.top_k));
        for (const Launch& l : launches_) {
            const bool routes = l.parameters.first_slot == 0;  // the first launch writes the routing
            const Range routing = elements(buffers_.activations[size_t(routing_)], 0, rows * routing_width());
            const Range out = elements(buffers_.activations[size_t(out_)], 0, rows * row_width(), element_);
            const bool both = l.parameters.slots > l.parameters.top_k;
            const uint32_t width =
                std::max(routes ? l.parameters.width : 0, both || !routes ? l.parameters.shared_width : 0);
            pass.launch(l.kernel(),
                        {reads(l.routed->codes), reads(l.routed->scales), reads(l.routed->biases),
                         reads(l.shared->codes), reads(l.shared->scales), reads(l.shared->biases),
                         reads(elements(buffers_.activations[size_t(in_)], 0, rows * hidden, element_)),
                         reads(elements(buffers_.router_logits, 0, rows * logits)), writes(out),
                         routes ? writes(routing) : unused(*routing.buffer), constant(l.parameters)},
                        {divided(width, kExpertColumns), l.parameters.slots, block.rows}, {kProjectThreads},
                        rows * l.work);
        }
    }

  private:
    Activation in_, out_, routing_;
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
        for (const Launch& l : launches_) {
            pass.launch(l.kernel(),
                        {reads(l.routed->codes), reads(l.routed->scales), reads(l.routed->biases),
                         reads(l.shared->codes), reads(l.shared->scales), reads(l.shared->biases),
                         reads(elements(buffers_.activations[size_t(in_)], 0, rows * row_width(), element_)),
                         reads(elements(buffers_.activations[size_t(routing_)], 0, rows * routing_width())),
                         updates(elements(buffers_.activations[size_t(residual_)], 0, rows * hidden)),
                         constant(l.parameters)},
                        {divided(hidden, kAddRows), 1, block.rows}, {kAddThreads}, rows * l.work);
        }
    }

  private:
    Activation in_, residual_, routing_;
};

}  // namespace

std::unique_ptr<Step> make_step(const Route& op, Builder& b) { return std::make_unique<RouteStep>(op, b); }

std::unique_ptr<Step> make_step(const ExpertsUp& op, Builder& b) {
    b.unfinished.erase(op.out);
    return std::make_unique<ExpertsUpStep>(op, b);
}

std::unique_ptr<Step> make_step(const ExpertsDown& op, Builder& b) {
    return std::make_unique<ExpertsDownStep>(op, b);
}

}  // namespace lily::metal
