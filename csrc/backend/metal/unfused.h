// The pieces of fused products, each a launch: where a fusion is switched off, or where the formats of
// weights don't allow it. Kernels of metal/ablation/unfused_*.metal.
#pragma once

#include <memory>

#include "backend/metal/norm_rows.h"
#include "backend/metal/step.h"

namespace lily::metal {

// [rows, width] of `element` bytes in Buffers::scratch, behind parts of `before` numbers of four bytes per
// row.
inline Range scratch_rows(const Buffers& buffers, size_t before, size_t rows, size_t width, size_t element) {
    return {buffers.scratch, 4 * static_cast<size_t>(kMostRows) * before, rows * width * element};
}

// out[m] = W x_m; rows of out are `stride` numbers apart.
class Product {
  public:
    enum class Result : uint8_t { activations, floats };

    Product(const DeviceMatrix* weights, Result result, Builder& b);
    void encode(const Range& in, const Range& out, uint32_t stride, uint32_t rows, Pass& pass) const;
    const DeviceMatrix& weights() const { return *weights_; }

  private:
    const DeviceMatrix* weights_;
    Result result_;
    Outputs outputs_;
    RowKernels kernels_;
};

// out = silu(gate) * up, in `slots` parts of each row.
class Swiglu {
  public:
    struct Shape {
        uint32_t width, slot_stride, row_stride;
    };
    // `sample` has a format of the model.
    Swiglu(const DeviceMatrix& sample, Builder& b);
    void encode(const Range& gate, const Range& up, const Range& out, const Shape& shape, uint32_t slots,
                uint32_t rows, Pass& pass) const;

  private:
    OneKernel kernel_;
};

// residual += x
class AddRows {
  public:
    AddRows(const DeviceMatrix& sample, Builder& b);
    void encode(const Range& x, const Range& residual, uint32_t count, Pass& pass) const;

  private:
    OneKernel kernel_;
};

// For all slots, or (routed = false) for the shared expert's alone, with the routing written already.
std::unique_ptr<Step> make_unfused_step(const ExpertsUp& op, bool routed, Builder& b);
std::unique_ptr<Step> make_unfused_step(const ExpertsDown& op, Builder& b);

}  // namespace lily::metal
