// The norm before products as a launch of its own.
#pragma once

#include "backend/metal/step.h"

namespace lily::metal {

// normed = rms(in) * gain for every row, for a product with `next`, and the inverse lengths into
// buffers.inverses.
class NormRows {
  public:
    NormRows(Activation in, const Placed* gain, float eps, const DeviceMatrix& next, Builder& b);
    void encode(const Range& normed, uint32_t rows, Pass& pass) const;

  private:
    Activation in_;
    const Placed* gain_;
    float eps_;
    uint32_t cols_;
    const Buffers& buffers_;
    OneKernel kernel_;
};

}  // namespace lily::metal
