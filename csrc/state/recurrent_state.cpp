#include "state/recurrent_state.h"

#include <cstring>

#include "base/numeric.h"

namespace lily {

RecurrentState::RecurrentState(const RecurrentLayout& layout)
    : layout_(layout),
      block_(layout.memory->allocate(StateUse::recurrent, static_cast<size_t>(layout.bytes()))) {}

RecurrentState::RecurrentState(const RecurrentState& other) : RecurrentState(other.layout_) {
    if (block_->size()) std::memcpy(block_->data(), other.block_->data(), block_->size());
}

std::vector<float> RecurrentState::read_matrices(int64_t layer) const {
    const auto* from = reinterpret_cast<const float*>(block_->data() + layout_.matrices_offset(layer));
    std::vector<float> result(from, from + layout_.matrix_floats());
    if (!layout_.keys_last) return result;
    const int64_t keys = layout_.key_dim;
    const int64_t values = layout_.value_dim;
    for (int64_t head = 0; head < layout_.heads; ++head) {
        float* matrix = result.data() + head * keys * values;
        const float* transposed = from + head * keys * values;
        for (int64_t k = 0; k < keys; ++k) {
            for (int64_t v = 0; v < values; ++v) matrix[k * values + v] = transposed[v * keys + k];
        }
    }
    return result;
}

std::vector<float> RecurrentState::read_conv(int64_t layer, int64_t length) const {
    const std::byte* from = block_->data() + layout_.conv_offset(layer);
    std::vector<float> result;
    result.reserve(static_cast<size_t>(layout_.taps * layout_.channels));
    for (int64_t tap = 0; tap < layout_.taps; ++tap) {
        const int64_t ring = layout_.ring;
        const int64_t row = ring > 0 ? (length - layout_.taps + tap + ring) % ring : tap;
        for (int64_t channel = 0; channel < layout_.channels; ++channel) {
            const int64_t at = row * layout_.channels + channel;
            result.push_back(layout_.bf16_inputs ? bf16_to_float(reinterpret_cast<const uint16_t*>(from)[at])
                                                 : reinterpret_cast<const float*>(from)[at]);
        }
    }
    return result;
}

}  // namespace lily
