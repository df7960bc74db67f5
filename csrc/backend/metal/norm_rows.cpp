// Launches of norm_rows of metal/matrix_simdgroup.metal.
#include "backend/metal/norm_rows.h"

#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr uint32_t kThreads = 256;

}  // namespace

NormRows::NormRows(Activation in, const Placed* gain, float eps, const DeviceMatrix& next, Builder& b)
    : in_(in),
      gain_(gain),
      eps_(eps),
      cols_(next.cols),
      buffers_(b.buffers),
      kernel_(b.kernels.of(next.format), "matrix_simdgroup", "norm_rows") {}

void NormRows::encode(const Range& normed, uint32_t rows, Pass& pass) const {
    pass.launch(kernel_(),
                {reads(elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * cols_)), reads(*gain_),
                 writes(normed), writes(elements(buffers_.inverses, 0, rows)),
                 constant(RowsShape{rows, cols_, 0, 0, 0, eps_})},
                {rows}, {kThreads});
}

}  // namespace lily::metal
