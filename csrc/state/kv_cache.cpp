#include "state/kv_cache.h"

#include <cstring>

#include "base/numeric.h"

namespace lily {

void KvCache::reserve(int64_t begin, int64_t end) {
    const auto first = static_cast<size_t>(begin / kPageTokens);
    const auto count = static_cast<size_t>((end + kPageTokens - 1) / kPageTokens);
    for (size_t i = first; i < count; ++i) {
        if (i >= pages_.size()) {
            pages_.push_back(std::make_shared<KvPage>(layout_));
        } else if (pages_[i].use_count() > 1) {
            auto copy = std::make_shared<KvPage>(layout_);
            std::memcpy(copy->data(), pages_[i]->data(), copy->size());
            pages_[i] = std::move(copy);
        }
    }
}

void KvCache::truncate(int64_t length) {
    const auto count = static_cast<size_t>((length + kPageTokens - 1) / kPageTokens);
    if (count < pages_.size()) pages_.resize(count);
}

std::pair<std::vector<float>, std::vector<float>> KvCache::read(int64_t layer, int64_t length) const {
    // Number `d` of the key or value in `slot`, which lies at `index`.
    const auto decode = [&](const std::byte* plane, int64_t index, int64_t d, int64_t slot) {
        switch (layout_.dtype) {
            case KvDtype::bf16:
                return bf16_to_float(reinterpret_cast<const uint16_t*>(plane)[index]);
            case KvDtype::f32:
                return reinterpret_cast<const float*>(plane)[index];
            case KvDtype::int8:
                break;
        }
        const auto* scales = reinterpret_cast<const float*>(plane + layout_.numbers_bytes());
        return static_cast<float>(reinterpret_cast<const int8_t*>(plane)[index]) *
               scales[d / kScaleDims * kPageTokens + slot];
    };
    std::pair<std::vector<float>, std::vector<float>> result;
    for (int64_t i = 0; i < length; ++i) {
        const int64_t slot = i % kPageTokens;
        for (int64_t head = 0; head < layout_.kv_heads; ++head) {
            const std::byte* base = page(i / kPageTokens);
            for (int64_t d = 0; d < layout_.head_dim; ++d) {
                result.first.push_back(
                    decode(base + layout_.keys_offset(layer, head), d * kPageTokens + slot, d, slot));
                result.second.push_back(
                    decode(base + layout_.values_offset(layer, head), slot * layout_.head_dim + d, d, slot));
            }
        }
    }
    return result;
}

}  // namespace lily
