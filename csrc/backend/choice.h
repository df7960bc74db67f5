// How a backend picks a token by itself, instead of handing out logits.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lily {

using TokenCounts = std::unordered_map<int32_t, int32_t>;
using LogitBias = std::vector<std::pair<int32_t, float>>;

// In place of a token: none is allowed, every logit is minus infinity after bias and masks.
constexpr int32_t kNoToken = -1;

// As in runtime/sampler.h. Chance comes from the seed and the token's position alone.
struct Choice {
    float temperature = 0.0f;  // 0: the largest logit, the lowest id among equals
    int64_t top_k = 0;         // 0: off
    float top_p = 1.0f;
    float min_p = 0.0f;
    uint64_t seed = 0;
    int64_t vocabulary = 0;  // ids from here on are never chosen
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    // What logits are changed by, null where they aren't; read while the backend is given the choice.
    const TokenCounts* counts = nullptr;  // of tokens that penalties count
    const LogitBias* bias = nullptr;      // added
    const std::vector<uint32_t>* allowed =
        nullptr;  // bit i % 32 of word i / 32 allows id i; other ids aren't
    // A number of these counts and this bias alone, kept while nothing is counted but tokens that the backend
    // chose, and how many of those there are.
    uint64_t history = 0;
    int64_t counted = 0;

    bool adjusts() const { return counts || bias || allowed; }
    bool operator==(const Choice&) const = default;
};

}  // namespace lily
