// What the Gated DeltaNet layers of one sequence remember: the state matrices and the last convolution
// inputs. The backend that computes with them says how they lie.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "state/state_memory.h"

namespace lily {

struct RecurrentLayout {
    int64_t layers = 0;
    int64_t heads = 0;  // value heads
    int64_t key_dim = 0;
    int64_t value_dim = 0;
    int64_t channels = 0;  // of the convolution
    int64_t taps = 0;      // inputs the next row needs: convolution width - 1

    bool keys_last = false;  // a head's matrix is [value_dim, key_dim] instead of [key_dim, value_dim]
    int64_t ring = 0;        // 0: the last `taps` inputs, oldest first; else those of position p at p % ring
    bool bf16_inputs = false;  // remembered inputs are bf16 instead of fp32
    std::shared_ptr<StateMemory> memory = heap_memory();

    int64_t matrix_floats() const { return heads * key_dim * value_dim; }
    int64_t matrix_bytes() const { return matrix_floats() * 4; }
    int64_t conv_rows() const { return ring > 0 ? ring : taps; }
    int64_t conv_bytes() const { return conv_rows() * channels * (bf16_inputs ? 2 : 4); }
    int64_t bytes() const { return layers * (matrix_bytes() + conv_bytes()); }
    // Of a layer's parts in the bytes of a state: all layers' matrices, then all layers' inputs.
    int64_t matrices_offset(int64_t layer) const { return layer * matrix_bytes(); }
    int64_t conv_offset(int64_t layer) const { return layers * matrix_bytes() + layer * conv_bytes(); }
};

class RecurrentState {
  public:
    explicit RecurrentState(const RecurrentLayout& layout);
    RecurrentState(const RecurrentState& other);
    RecurrentState(RecurrentState&&) = default;
    RecurrentState& operator=(RecurrentState&&) = default;
    RecurrentState& operator=(const RecurrentState&) = delete;

    // In the layout's form; `conv` of fp32 inputs.
    float* matrices(int64_t layer) {
        return reinterpret_cast<float*>(block_->data() + layout_.matrices_offset(layer));
    }
    float* conv(int64_t layer) {
        return reinterpret_cast<float*>(block_->data() + layout_.conv_offset(layer));
    }
    const RecurrentLayout& layout() const { return layout_; }
    StateBlock& block() { return *block_; }
    std::span<std::byte> bytes() { return {block_->data(), block_->size()}; }
    std::span<const std::byte> bytes() const { return {block_->data(), block_->size()}; }

    // For inspection, whatever the layout: fp32 [heads, key_dim, value_dim], and fp32 [taps, channels] of the
    // inputs before position `length`, oldest first.
    std::vector<float> read_matrices(int64_t layer) const;
    std::vector<float> read_conv(int64_t layer, int64_t length) const;

  private:
    RecurrentLayout layout_;
    std::unique_ptr<StateBlock> block_;
};

}  // namespace lily
