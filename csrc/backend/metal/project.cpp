// Launches of metal/project.metal.
#include "backend/metal/step.h"
#include "base/error.h"

namespace lily::metal {
namespace {

struct ProjectShape {
    uint32_t rows, cols, outputs, out_stride, group_shift;
    float eps;
};

ProjectShape shape_of(const DeviceMatrix& w, uint32_t rows, uint32_t outputs, uint32_t out_stride,
                      float eps) {
    return {rows, w.cols, outputs, out_stride, w.group_shift, eps};
}

RowKernels kernels_of(Builder& b, const std::string& name, const DeviceMatrix& w) {
    return {b.kernels.of(w.format), "project", name + "_" + w.format.name};
}

class NormProjectStep final : public Step {
  public:
    NormProjectStep(const NormProject& op, Builder& b)
        : op_(op),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          gain_(b.weights.vector(*op.norm)) {
        for (const DeviceMatrix* w : b.weights.stack_by_format(op.weights)) {
            parts_.push_back({w, columns_, kernels_of(b, "norm_project", *w)});
            columns_ += w->rows;
        }
    }

    void encode(const Block& block, Pass& pass) const override {
        const DeviceBuffer& in = buffers_.activations[size_t(op_.in)];
        const DeviceBuffer& out = buffers_.activations[size_t(op_.out)];
        for (const ColumnPart& part : parts_) {
            const DeviceMatrix& w = *part.weights;
            const size_t last = size_t{block.rows - 1} * columns_ + w.rows;
            pass.launch(part.kernels(block.rows),
                        {reads(w.codes), reads(w.scales), reads(w.biases),
                         reads(elements(in, 0, size_t{block.rows} * w.cols)), reads(*gain_),
                         writes(Range(out, part.first * element_, last * element_)),
                         constant(shape_of(w, block.rows, w.rows, columns_, op_.eps))},
                        {divided(w.rows, weight_rows(kProjectWanted, row_room(block.rows)))},
                        {kProjectThreads});
        }
    }

  private:
    struct ColumnPart {
        const DeviceMatrix* weights;
        uint32_t first;
        RowKernels kernels;
    };
    NormProject op_;
    const Buffers& buffers_;
    size_t element_;
    const Placed* gain_;
    std::vector<ColumnPart> parts_;
    uint32_t columns_ = 0;
};

class NormGateUpStep final : public Step {
  public:
    NormGateUpStep(const NormGateUp& op, Builder& b)
        : in_(op.in),
          out_(op.out),
          eps_(op.eps),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          gain_(b.weights.vector(*op.norm)),
          weights_(b.weights.stack(std::vector{op.gate, op.up})),
          kernels_(kernels_of(b, "norm_gate_up", *weights_)) {}

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = *weights_;
        const uint32_t outputs = w.rows / 2;
        const size_t rows = block.rows;
        pass.launch(kernels_(block.rows),
                    {reads(w.codes), reads(w.scales), reads(w.biases),
                     reads(elements(buffers_.activations[size_t(in_)], 0, rows * w.cols)), reads(*gain_),
                     writes(elements(buffers_.activations[size_t(out_)], 0, rows * outputs, element_)),
                     constant(shape_of(w, block.rows, outputs, outputs, eps_))},
                    {divided(w.rows, weight_rows(kGateUpWanted, row_room(block.rows)))}, {kProjectThreads});
    }

  private:
    Activation in_, out_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
    const Placed* gain_;
    const DeviceMatrix* weights_;
    RowKernels kernels_;
};

class ProjectAddStep final : public Step {
  public:
    ProjectAddStep(const ProjectAdd& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          weights_(b.weights.stack({&op.weight, 1})),
          norm_(b.unfinished.contains(op.in) ? std::optional(b.unfinished.at(op.in)) : std::nullopt),
          kernels_(kernels_of(b, norm_ ? "project_add_heads" : "project_add", *weights_)) {}

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = *weights_;
        const size_t rows = block.rows;
        std::vector<Argument> arguments = {
            reads(w.codes), reads(w.scales), reads(w.biases),
            reads(elements(buffers_.activations[size_t(in_)], 0, rows * w.cols, element_)),
            updates(elements(buffers_.activations[size_t(residual_)], 0, rows * w.rows))};
        const ProjectShape shape = shape_of(w, block.rows, w.rows, w.rows, 0.0f);
        arguments.push_back(constant(shape));
        if (norm_) {
            arguments.push_back(reads(elements(buffers_.squares, 0, rows * norm_->heads * norm_->slices)));
            arguments.push_back(constant(*norm_));
        }
        pass.launch(kernels_(block.rows), arguments, {divided(w.rows, kAddRows)}, {kAddThreads});
    }

  private:
    Activation in_, residual_;
    const Buffers& buffers_;
    size_t element_;
    const DeviceMatrix* weights_;
    std::optional<HeadNorm> norm_;
    RowKernels kernels_;
};

}  // namespace

std::unique_ptr<Step> make_step(const NormProject& op, Builder& b) {
    b.unfinished.erase(op.out);
    return std::make_unique<NormProjectStep>(op, b);
}

std::unique_ptr<Step> make_step(const NormGateUp& op, Builder& b) {
    b.unfinished.erase(op.out);
    return std::make_unique<NormGateUpStep>(op, b);
}

std::unique_ptr<Step> make_step(const ProjectAdd& op, Builder& b) {
    return std::make_unique<ProjectAddStep>(op, b);
}

std::unique_ptr<Step> make_step(const CombineHidden& op, Builder&) {
    throw BackendError(op.weight.label + ": the Metal backend can't run a multi-token prediction head yet");
}

}  // namespace lily::metal
