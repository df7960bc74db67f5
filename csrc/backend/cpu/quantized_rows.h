// Activations of some rows in the forms that matrix kernels read. Owned by the backend, reused by every op.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "base/buffer.h"

namespace lily::cpu {

class QuantizedRows {
  public:
    // Room for rows of this width; `values` stay where they are. Few rows are also kept as bytes.
    void shape(const float* values, int64_t rows, int64_t cols, bool integers, bool digits) {
        view_.values = values;
        view_.cols = cols;
        if (!integers) return;
        const auto n = static_cast<size_t>(rows);
        integers_.ensure(n * static_cast<size_t>(view_.padded()));
        scales_.ensure(n * static_cast<size_t>(view_.blocks()));
        sums_.ensure(n * static_cast<size_t>(view_.sum_floats()));
        if (digits) digits_.ensure(n * static_cast<size_t>(view_.digit_stride()));
        view_.digits = digits ? digits_.data() : nullptr;
        view_.integers = integers_.data();
        view_.scales = scales_.data();
        view_.sums = sums_.data();
    }

    void quantize(const Kernels& kernels, int64_t row) {
        kernels.quantize_row(view_.values + row * view_.cols, view_.cols,
                             integers_.data() + row * view_.padded(),
                             view_.digits ? digits_.data() + row * view_.digit_stride() : nullptr,
                             scales_.data() + row * view_.blocks(), sums_.data() + row * view_.sum_floats());
    }

    const RowsView& view() const { return view_; }

  private:
    RowsView view_;
    Buffer<int16_t> integers_;
    Buffer<int8_t> digits_;
    Buffer<float> scales_;
    Buffer<float> sums_;
};

}  // namespace lily::cpu
