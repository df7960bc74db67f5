// How a backend picks a token by itself, instead of handing out logits.
#pragma once

#include <cstdint>

namespace lily {

// As in runtime/sampler.h. Chance comes from the seed and the token's position alone.
struct Choice {
    float temperature = 0.0f;  // 0: the largest logit, the lowest id among equals
    int64_t top_k = 0;         // 0: off
    float top_p = 1.0f;
    float min_p = 0.0f;
    uint64_t seed = 0;
    int64_t vocabulary = 0;  // ids from here on are never chosen
    bool operator==(const Choice&) const = default;
};

}  // namespace lily
