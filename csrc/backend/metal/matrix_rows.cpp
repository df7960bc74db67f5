// Launches of the dense kernels of metal/matrix_simdgroup.metal and metal/matrix_tensor.metal.
#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "matrix_simdgroup";
constexpr uint32_t kNormThreads = 256;

TileKernels kernels_of(Builder& b, const std::string& name, const DeviceMatrix& w) {
    return {b.kernels.of(w.format), name + "_" + w.format.name};
}

class NormProjectRows final : public Step {
  public:
    NormProjectRows(const NormProject& op, Builder& b)
        : op_(op),
          buffers_(b.buffers),
          path_(b.path),
          element_(b.switches.activation_bytes()),
          norm_(op.in, b.weights.vector(*op.norm), op.eps, op.weights[0], b) {
        for (const DeviceMatrix* w : b.weights.stack_by_format(op.weights)) {
            parts_.push_back({w, columns_, kernels_of(b, "project_rows", *w)});
            columns_ += w->rows;
        }
        b.sizes.at_least(&Sizes::normed, op.weights[0].cols);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const Range normed = elements(buffers_.normed, 0, size_t{rows} * parts_[0].weights->cols, element_);
        norm_.encode(normed, rows, pass);
        const DeviceBuffer& out = buffers_.activations[size_t(op_.out)];
        for (const Part& part : parts_) {
            const DeviceMatrix& w = *part.weights;
            const Tiling tile = dense_tiling(path_, rows);
            const size_t last = size_t{rows - 1} * columns_ + w.rows;
            pass.launch(part.kernels(path_, tile),
                        {reads(w.codes), reads(w.scales), reads(w.biases), reads(normed),
                         writes(Range(out, part.first * element_, last * element_)),
                         constant(RowsShape{rows, w.cols, w.rows, columns_, w.group_shift, op_.eps})},
                        {divided(w.rows, tile.columns), divided(rows, tile.rows)}, {tile.threads},
                        w.matrix_bytes + as_bytes(uint64_t{rows} * w.rows * w.cols));
        }
    }

  private:
    struct Part {
        const DeviceMatrix* weights;
        uint32_t first;
        TileKernels kernels;
    };
    NormProject op_;
    const Buffers& buffers_;
    const MatrixPath& path_;
    size_t element_;
    NormRows norm_;
    std::vector<Part> parts_;
    uint32_t columns_ = 0;
};

class NormGateUpRows final : public Step {
  public:
    NormGateUpRows(const NormGateUp& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          path_(b.path),
          element_(b.switches.activation_bytes()),
          norm_(op.in, b.weights.vector(*op.norm), op.eps, op.gate, b),
          weights_(b.weights.stack(std::vector{op.gate, op.up})),
          kernels_(kernels_of(b, "gate_up_rows", *weights_)) {
        b.sizes.at_least(&Sizes::normed, op.gate.cols);
    }

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = *weights_;
        const uint32_t rows = block.rows;
        const uint32_t outputs = w.rows / 2;
        const Tiling tile = dense_tiling(path_, rows);
        const Range normed = elements(buffers_.normed, 0, size_t{rows} * w.cols, element_);
        norm_.encode(normed, rows, pass);
        pass.launch(
            kernels_(path_, tile),
            {reads(w.codes), reads(w.scales), reads(w.biases), reads(normed),
             writes(elements(buffers_.activations[size_t(out_)], 0, size_t{rows} * outputs, element_)),
             constant(RowsShape{rows, w.cols, outputs, outputs, w.group_shift, 0.0f})},
            {divided(outputs, tile.pair_columns), divided(rows, tile.rows)}, {tile.threads},
            w.matrix_bytes + as_bytes(uint64_t{rows} * w.rows * w.cols));
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    const MatrixPath& path_;
    size_t element_;
    NormRows norm_;
    const DeviceMatrix* weights_;
    TileKernels kernels_;
};

class ProjectAddRows final : public Step {
  public:
    ProjectAddRows(const ProjectAdd& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          buffers_(b.buffers),
          path_(b.path),
          element_(b.switches.activation_bytes()),
          weights_(b.weights.stack({&op.weight, 1})),
          kernels_(kernels_of(b, "project_add_rows", *weights_)) {}

    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = *weights_;
        const uint32_t rows = block.rows;
        const Tiling tile = dense_tiling(path_, rows);
        pass.launch(kernels_(path_, tile),
                    {reads(w.codes), reads(w.scales), reads(w.biases),
                     reads(elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * w.cols, element_)),
                     updates(elements(buffers_.activations[size_t(residual_)], 0, size_t{rows} * w.rows)),
                     constant(RowsShape{rows, w.cols, w.rows, w.rows, w.group_shift, 0.0f})},
                    {divided(w.rows, tile.columns), divided(rows, tile.rows)}, {tile.threads},
                    w.matrix_bytes + as_bytes(uint64_t{rows} * w.rows * w.cols));
    }

  private:
    Activation in_, residual_;
    const Buffers& buffers_;
    const MatrixPath& path_;
    size_t element_;
    const DeviceMatrix* weights_;
    TileKernels kernels_;
};

}  // namespace

NormRows::NormRows(Activation in, const Placed* gain, float eps, const Matrix& next, Builder& b)
    : in_(in),
      gain_(gain),
      eps_(eps),
      cols_(static_cast<uint32_t>(next.cols)),
      buffers_(b.buffers),
      kernel_(b.kernels.of(number_format(next)), kFamily, "norm_rows") {}

void NormRows::encode(const Range& normed, uint32_t rows, Pass& pass) const {
    pass.launch(kernel_(),
                {reads(elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * cols_)), reads(*gain_),
                 writes(normed), writes(elements(buffers_.inverses, 0, rows)),
                 constant(RowsShape{rows, cols_, 0, 0, 0, eps_})},
                {rows}, {kNormThreads});
}

std::unique_ptr<Step> make_rows_step(const Embed&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const Head&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const CombineHidden&, Builder&) { return nullptr; }

const char* rows_obstacle(const Op& op) {
    if (std::holds_alternative<CombineHidden>(op)) return "a draft head's input is made for few rows";
    if (const auto* delta = std::get_if<DeltaRule>(&op)) {
        const int64_t taps = delta->shape.conv_width;
        if (taps < 2 || taps > 4) return "the convolution doesn't have 2, 3 or 4 taps";
    }
    if (const auto* route = std::get_if<Route>(&op)) {
        for (const Matrix& gate : route->shared_gate) {
            if (!Weights::same_format(route->router, gate)) return "router and shared gate differ in format";
        }
    }
    if (const auto* dense = std::get_if<NormGateUp>(&op)) {
        if (!Weights::same_format(dense->gate, dense->up)) return "gate and up differ in format";
    }
    if (const auto* up = std::get_if<ExpertsUp>(&op)) {
        const bool shared =
            up->shared_gate.empty() || Weights::same_format(up->shared_gate[0], up->shared_up[0]);
        if (!shared || !Weights::same_format(up->gate[0], up->up[0])) return "gate and up differ in format";
    }
    return nullptr;
}

std::unique_ptr<Step> make_rows_step(const NormProject& op, Builder& b) {
    return std::make_unique<NormProjectRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const NormGateUp& op, Builder& b) {
    return std::make_unique<NormGateUpRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const ProjectAdd& op, Builder& b) {
    return std::make_unique<ProjectAddRows>(op, b);
}

}  // namespace lily::metal
