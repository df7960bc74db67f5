// Launches of the dense kernels of metal/matrix_simdgroup.metal and metal/matrix_tensor.metal.
#include <optional>

#include "backend/metal/rows.h"
#include "backend/metal/unfused.h"

namespace lily::metal {
namespace {

// A product with one matrix: W, gate and up, or a residual's.
class DenseProduct {
  public:
    DenseProduct(const std::string& name, const DeviceMatrix* weights, Builder& b)
        : operand_(weights, 1, 0, b),
          path_(b.path),
          kernels_(b.kernels.of(operand_.format()), name + "_" + operand_.format().name) {}

    const DeviceMatrix& weights() const { return operand_.stored(); }
    // `outputs` columns by threadgroups of `columns`.
    void launch(const Range& in, const Argument& out, uint32_t rows, uint32_t outputs, uint32_t out_stride,
                uint32_t Tiling::* columns, float eps, Pass& pass) const {
        const DeviceMatrix& w = weights();
        const Tiling tile = dense_tiling(path_, rows);
        const auto [codes, scales, biases] = operand_.arguments();
        operand_.expand(pass);
        pass.launch(kernels_(path_, tile),
                    {codes, scales, biases, reads(in), out,
                     constant(RowsShape{rows, w.cols, outputs, out_stride, w.group_shift, eps})},
                    {divided(outputs, tile.*columns), divided(rows, tile.rows)}, {tile.threads},
                    {.multiply_adds = uint64_t{rows} * w.rows * w.cols});
    }

  private:
    Operand operand_;
    const MatrixPath& path_;
    TileKernels kernels_;
};

class NormProjectRows final : public Step {
  public:
    NormProjectRows(const NormProject& op, Builder& b)
        : op_(op), buffers_(b.buffers), element_(b.switches.activation_bytes()) {
        for (const DeviceMatrix* w : b.weights.stack_by_format(op.weights)) {
            parts_.push_back({columns_, DenseProduct("project_rows", w, b)});
            columns_ += w->rows;
        }
        norm_.emplace(op.in, b.weights.vector(*op.norm), op.eps, parts_[0].product.weights(), b);
        b.sizes.at_least(&Sizes::normed, op.weights[0].cols);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const Range normed =
            elements(buffers_.normed, 0, size_t{rows} * parts_[0].product.weights().cols, element_);
        norm_->encode(normed, rows, pass);
        for (const auto& [first, product] : parts_) {
            const uint32_t own = product.weights().rows;
            const Range out = elements(buffers_.activations[size_t(op_.out)], first,
                                       size_t{rows - 1} * columns_ + own, element_);
            product.launch(normed, writes(out), rows, own, columns_, &Tiling::columns, op_.eps, pass);
        }
    }

  private:
    struct Part {
        uint32_t first;  // column
        DenseProduct product;
    };
    NormProject op_;
    const Buffers& buffers_;
    size_t element_;
    std::optional<NormRows> norm_;
    std::vector<Part> parts_;
    uint32_t columns_ = 0;
};

class NormGateUpRows final : public Step {
  public:
    NormGateUpRows(const NormGateUp& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          product_("gate_up_rows", b.weights.stack(std::vector{op.gate, op.up}), b),
          norm_(op.in, b.weights.vector(*op.norm), op.eps, product_.weights(), b) {
        b.sizes.at_least(&Sizes::normed, op.gate.cols);
    }

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = product_.weights();
        const uint32_t rows = block.rows;
        const uint32_t outputs = w.rows / 2;
        const Range normed = elements(buffers_.normed, 0, size_t{rows} * w.cols, element_);
        norm_.encode(normed, rows, pass);
        const Range out = elements(buffers_.activations[size_t(out_)], 0, size_t{rows} * outputs, element_);
        product_.launch(normed, writes(out), rows, outputs, outputs, &Tiling::pair_columns, 0.0f, pass);
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    size_t element_;
    DenseProduct product_;
    NormRows norm_;
};

// Gate and up of different formats: a product each, and SwiGLU of both.
class UnfusedGateUpRows final : public Step {
  public:
    UnfusedGateUpRows(const NormGateUp& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          gate_("project_rows", b.weights.stack({&op.gate, 1}), b),
          up_("project_rows", b.weights.stack({&op.up, 1}), b),
          norm_(op.in, b.weights.vector(*op.norm), op.eps, gate_.weights(), b),
          swiglu_(gate_.weights(), b) {
        b.sizes.at_least(&Sizes::normed, op.gate.cols);
        b.sizes.at_least(&Sizes::products, 2 * op.gate.rows);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const uint32_t width = gate_.weights().rows;
        const size_t count = size_t{rows} * width;
        const Range normed = elements(buffers_.normed, 0, size_t{rows} * gate_.weights().cols, element_);
        const Range gate = elements(buffers_.products, 0, count, element_);
        const Range up = elements(buffers_.products, count, count, element_);
        norm_.encode(normed, rows, pass);
        gate_.launch(normed, writes(gate), rows, width, width, &Tiling::columns, 0.0f, pass);
        up_.launch(normed, writes(up), rows, width, width, &Tiling::columns, 0.0f, pass);
        swiglu_.encode(gate, up, elements(buffers_.activations[size_t(out_)], 0, count, element_),
                       {width, 0, width}, 1, rows, pass);
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    size_t element_;
    DenseProduct gate_, up_;
    NormRows norm_;
    Swiglu swiglu_;
};

class ProjectAddRows final : public Step {
  public:
    ProjectAddRows(const ProjectAdd& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          product_("project_add_rows", b.weights.stack({&op.weight, 1}), b) {}

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = product_.weights();
        const uint32_t rows = block.rows;
        const Range in = elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * w.cols, element_);
        const Range residual = elements(buffers_.activations[size_t(residual_)], 0, size_t{rows} * w.rows);
        product_.launch(in, updates(residual), rows, w.rows, w.rows, &Tiling::columns, 0.0f, pass);
    }

  private:
    Activation in_, residual_;
    const Buffers& buffers_;
    size_t element_;
    DenseProduct product_;
};

}  // namespace

std::unique_ptr<Step> make_rows_step(const Embed&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const Head&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const CombineHidden&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const NormProject& op, Builder& b) {
    return std::make_unique<NormProjectRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const NormGateUp& op, Builder& b) {
    if (!Weights::same_format(op.gate, op.up)) return std::make_unique<UnfusedGateUpRows>(op, b);
    return std::make_unique<NormGateUpRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const ProjectAdd& op, Builder& b) {
    return std::make_unique<ProjectAddRows>(op, b);
}

}  // namespace lily::metal
