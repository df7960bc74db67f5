// Launches of metal/project.metal.
#include "backend/metal/unfused.h"
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

// rms(in) * gain and its products with matrices of different formats: the norm in each of their launches, or
// as one before them.
class NormProducts {
  public:
    NormProducts(Activation in, const Vector& norm, float eps, Builder& b)
        : in_(in),
          eps_(eps),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          outputs_(b.switches.outputs()),
          gain_(b.weights.vector(*norm)) {}

    void add(const DeviceMatrix* weights, Builder& b) {
        weights_.push_back(weights);
        if (b.switches.fused_norms) {
            kernels_.push_back(kernels_of(b, "norm_project", *weights));
            return;
        }
        if (!norm_) norm_.emplace(in_, gain_, eps_, *weights, b);
        products_.emplace_back(weights, Product::Result::activations, b);
        b.sizes.at_least(&Sizes::normed, weights->cols);
    }
    const std::vector<const DeviceMatrix*>& weights() const { return weights_; }

    void encode_norm(uint32_t rows, Pass& pass) const {
        if (norm_) norm_->encode(normed(rows), rows, pass);
    }

    // Product i, into rows that lie `stride` numbers apart.
    void encode(size_t i, const Range& out, uint32_t stride, uint32_t rows, Pass& pass) const {
        const DeviceMatrix& w = *weights_[i];
        if (norm_) {
            products_[i].encode(normed(rows), out, stride, rows, pass);
            return;
        }
        pass.launch(kernels_[i](rows),
                    {reads(w.codes), reads(w.scales), reads(w.biases),
                     reads(elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * w.cols)),
                     reads(*gain_), writes(out), constant(shape_of(w, rows, w.rows, stride, eps_))},
                    {divided(w.rows, outputs_.project(rows))}, {kProjectThreads});
    }

  private:
    Range normed(uint32_t rows) const {
        return elements(buffers_.normed, 0, size_t{rows} * weights_[0]->cols, element_);
    }

    Activation in_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
    Outputs outputs_;
    const Placed* gain_;
    std::vector<const DeviceMatrix*> weights_;
    std::vector<RowKernels> kernels_;
    std::optional<NormRows> norm_;
    std::vector<Product> products_;
};

class NormProjectStep final : public Step {
  public:
    NormProjectStep(const NormProject& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          products_(op.in, op.norm, op.eps, b) {
        for (const DeviceMatrix* w : b.weights.stack_by_format(op.weights)) {
            products_.add(w, b);
            columns_ += w->rows;
        }
    }

    void encode(const Block& block, Pass& pass) const override {
        const Placed& out = buffers_.activations[size_t(out_)];
        products_.encode_norm(block.rows, pass);
        size_t column = 0;
        for (size_t i = 0; i < products_.weights().size(); ++i) {
            const uint32_t width = products_.weights()[i]->rows;
            const size_t last = size_t{block.rows - 1} * columns_ + width;
            products_.encode(i, elements(out, column, last, element_), columns_, block.rows, pass);
            column += width;
        }
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    size_t element_;
    NormProducts products_;
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
          outputs_(b.switches.outputs()),
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
                    {divided(outputs, outputs_.gate_up(block.rows))}, {kProjectThreads});
    }

  private:
    Activation in_, out_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
    Outputs outputs_;
    const Placed* gain_;
    const DeviceMatrix* weights_;
    RowKernels kernels_;
};

// Gate and up as launches of their own: switched off, or of different formats.
class UnfusedGateUpStep final : public Step {
  public:
    UnfusedGateUpStep(const NormGateUp& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          width_(static_cast<uint32_t>(op.gate.rows)),
          products_(op.in, op.norm, op.eps, b) {
        products_.add(b.weights.stack({&op.gate, 1}), b);
        products_.add(b.weights.stack({&op.up, 1}), b);
        swiglu_.emplace(*products_.weights()[0], b);
        b.sizes.at_least(&Sizes::scratch, 2 * int64_t{width_});
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const Range gate = scratch_rows(buffers_, 0, rows, width_, element_);
        const Range up = scratch_rows(buffers_, width_, rows, width_, element_);
        products_.encode_norm(rows, pass);
        products_.encode(0, gate, width_, rows, pass);
        products_.encode(1, up, width_, rows, pass);
        swiglu_->encode(gate, up,
                        elements(buffers_.activations[size_t(out_)], 0, size_t{rows} * width_, element_),
                        {width_, 0, width_}, 1, rows, pass);
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    size_t element_;
    uint32_t width_;
    NormProducts products_;
    std::optional<Swiglu> swiglu_;
};

class ProjectAddStep final : public Step {
  public:
    ProjectAddStep(const ProjectAdd& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          outputs_(b.switches.outputs()),
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
        pass.launch(kernels_(block.rows), arguments, {divided(w.rows, outputs_.add())}, {kAddThreads});
    }

  private:
    Activation in_, residual_;
    const Buffers& buffers_;
    size_t element_;
    Outputs outputs_;
    const DeviceMatrix* weights_;
    std::optional<HeadNorm> norm_;
    RowKernels kernels_;
};

class UnfusedAddStep final : public Step {
  public:
    UnfusedAddStep(const ProjectAdd& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          product_(b.weights.stack({&op.weight, 1}), Product::Result::activations, b),
          add_(product_.weights(), b) {
        b.sizes.at_least(&Sizes::scratch, op.weight.rows);
    }

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = product_.weights();
        const size_t rows = block.rows;
        const Range sum = scratch_rows(buffers_, 0, rows, w.rows, element_);
        product_.encode(elements(buffers_.activations[size_t(in_)], 0, rows * w.cols, element_), sum, w.rows,
                        block.rows, pass);
        add_.encode(sum, elements(buffers_.activations[size_t(residual_)], 0, rows * w.rows),
                    block.rows * w.rows, pass);
    }

  private:
    Activation in_, residual_;
    const Buffers& buffers_;
    size_t element_;
    Product product_;
    AddRows add_;
};

}  // namespace

std::unique_ptr<Step> make_step(const NormProject& op, Builder& b) {
    b.unfinished.erase(op.out);
    return std::make_unique<NormProjectStep>(op, b);
}

std::unique_ptr<Step> make_step(const NormGateUp& op, Builder& b) {
    b.unfinished.erase(op.out);
    const bool fuses = b.switches.fused_gate_up && Weights::same_format(op.gate, op.up);
    if (!fuses) return std::make_unique<UnfusedGateUpStep>(op, b);
    return std::make_unique<NormGateUpStep>(op, b);
}

std::unique_ptr<Step> make_step(const ProjectAdd& op, Builder& b) {
    // After delta_rule the product ends the norm of its input, and there is no such product alone.
    if (!b.switches.fused_adds && !b.unfinished.contains(op.in))
        return std::make_unique<UnfusedAddStep>(op, b);
    return std::make_unique<ProjectAddStep>(op, b);
}

}  // namespace lily::metal
