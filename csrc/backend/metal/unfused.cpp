// Launches of metal/ablation/unfused_project.metal.
#include "backend/metal/unfused.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "unfused_project";
constexpr uint32_t kThreads = 256;

struct ProductShape {
    uint32_t rows, cols, outputs, out_stride, group_shift;
};

std::string product_name(Product::Result result, const DeviceMatrix& w) {
    return (result == Product::Result::floats ? "project_float_" : "project_") + w.format.name;
}

}  // namespace

Product::Product(const DeviceMatrix* weights, Result result, Builder& b)
    : weights_(weights),
      result_(result),
      outputs_(b.switches.outputs()),
      kernels_(b.kernels.unfused(weights->format), kFamily, product_name(result, *weights)) {}

void Product::encode(const Range& in, const Range& out, uint32_t stride, uint32_t rows, Pass& pass) const {
    const DeviceMatrix& w = *weights_;
    const uint32_t each = result_ == Result::floats ? outputs_.project(rows) : outputs_.pieces();
    pass.launch(kernels_(rows),
                {reads(w.codes), reads(w.scales), reads(w.biases), reads(in), writes(out),
                 constant(ProductShape{rows, w.cols, w.rows, stride, w.group_shift})},
                {divided(w.rows, each)}, {kThreads});
}

Swiglu::Swiglu(const DeviceMatrix& sample, Builder& b)
    : kernel_(b.kernels.unfused(sample.format), kFamily, "swiglu") {}

void Swiglu::encode(const Range& gate, const Range& up, const Range& out, const Shape& shape, uint32_t slots,
                    uint32_t rows, Pass& pass) const {
    pass.launch(kernel_(), {reads(gate), reads(up), writes(out), constant(shape)},
                {divided(shape.width, kThreads), slots, rows}, {kThreads});
}

AddRows::AddRows(const DeviceMatrix& sample, Builder& b)
    : kernel_(b.kernels.unfused(sample.format), kFamily, "add_rows") {}

void AddRows::encode(const Range& x, const Range& residual, uint32_t count, Pass& pass) const {
    pass.launch(kernel_(), {reads(x), updates(residual), constant(count)}, {divided(count, kThreads)},
                {kThreads});
}

}  // namespace lily::metal
