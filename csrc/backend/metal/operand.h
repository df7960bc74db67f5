// A weight matrix as products of many rows take it: as it is stored, or expanded before.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "backend/metal/step.h"

namespace lily::metal {

// `count` matrices of a stack. Without `compressed_weights` they are written as plain numbers of the
// activations' type into buffers.expanded, from `offset` on, before each product.
class Operand {
  public:
    Operand(const DeviceMatrix* weights, uint64_t count, size_t offset, Builder& b);

    const DeviceMatrix& stored() const { return *weights_; }
    const NumberFormat& format() const { return expanded_ ? *expanded_ : weights_->format; }
    uint64_t matrix_bytes() const { return expanded_ ? bytes_ / count_ : weights_->matrix_bytes; }
    size_t end() const { return expanded_ ? offset_ + bytes_ : offset_; }  // of its place

    void expand(Pass& pass) const;
    // Codes, scales and biases as products bind them.
    std::array<Argument, 3> arguments() const;

  private:
    const DeviceMatrix* weights_;
    uint64_t count_;
    size_t offset_, bytes_ = 0;
    const Buffers& buffers_;
    std::optional<NumberFormat> expanded_;
    std::optional<OneKernel> expand_;
};

}  // namespace lily::metal
