// What the Gated DeltaNet layers of one sequence remember: the state matrices and the last convolution
// inputs.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "base/buffer.h"

namespace lily {

struct RecurrentLayout {
    int64_t layers = 0;
    int64_t heads = 0;  // value heads
    int64_t key_dim = 0;
    int64_t value_dim = 0;
    int64_t channels = 0;  // of the convolution
    int64_t taps = 0;      // remembered inputs: convolution width - 1

    int64_t matrix_floats() const { return heads * key_dim * value_dim; }
    int64_t conv_floats() const { return taps * channels; }
    int64_t bytes() const { return layers * (matrix_floats() + conv_floats()) * 4; }
};

class RecurrentState {
  public:
    explicit RecurrentState(const RecurrentLayout& layout)
        : layout_(layout), floats_(static_cast<size_t>(layout.bytes() / 4)) {}
    RecurrentState(const RecurrentState& other) : RecurrentState(other.layout_) {
        if (floats_.size()) std::memcpy(floats_.data(), other.floats_.data(), floats_.bytes());
    }
    RecurrentState(RecurrentState&&) = default;
    RecurrentState& operator=(RecurrentState&&) = default;
    RecurrentState& operator=(const RecurrentState&) = delete;

    // [heads, key_dim, value_dim]
    float* matrices(int64_t layer) { return floats_.data() + layer * layout_.matrix_floats(); }
    // [taps, channels], oldest first
    float* conv(int64_t layer) {
        return floats_.data() + layout_.layers * layout_.matrix_floats() + layer * layout_.conv_floats();
    }
    const RecurrentLayout& layout() const { return layout_; }
    // All layers' matrices, then all layers' convolution inputs.
    std::span<float> floats() { return floats_.span(); }
    std::span<const float> floats() const { return {floats_.data(), floats_.size()}; }

  private:
    RecurrentLayout layout_;
    Buffer<float> floats_;
};

}  // namespace lily
