#include "backend/metal/memory_needs.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace lily::metal {
namespace {

uint64_t pool_bytes(const StateLayout& layout, int64_t tokens) {
    return divided(static_cast<uint64_t>(tokens), kPageTokens) *
           static_cast<uint64_t>(layout.kv.page_bytes());
}

}  // namespace

// Splits become longer at two lengths, so that the most may be just before.
uint64_t MemoryNeeds::partial(int64_t tokens) const {
    uint32_t most = 0;
    for (const int64_t length : {int64_t{kMediumFrom} - 1, int64_t{kLongFrom} - 1, tokens}) {
        if (length <= tokens || length < kMediumFrom) most = std::max(most, switches.splits(length));
    }
    return Buffers::split_bytes(sizes, most);
}

uint64_t MemoryNeeds::states(int64_t tokens) const {
    uint64_t total = 0;
    for (const StateLayout* layout : layouts) {
        total += Device::whole_pages(pool_bytes(*layout, tokens)) +
                 3 * Device::whole_pages(static_cast<uint64_t>(layout->recurrent.bytes()));
    }
    return total;
}

int64_t MemoryNeeds::fitting() const {
    const auto fits = [&](int64_t tokens) {
        const bool in_one = std::ranges::all_of(layouts, [&](const StateLayout* layout) {
            return pool_bytes(*layout, tokens) <= largest_buffer;
        });
        return in_one && fixed() + partial(tokens) + states(tokens) <= limit;
    };
    int64_t low = 0, high = positions;  // `low` fits
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (fits(middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

void MemoryNeeds::require(int64_t tokens) const {
    const int64_t most = fitting();
    if (tokens <= most) return;
    const std::string gpu = "the GPU's limit is " + in_units(limit);
    const std::string parts =
        "the weights take " + in_units(weights) + " and buffers " + in_units(block + steps);
    if (most == 0) {
        throw MemoryBudgetError("the model doesn't fit into GPU memory: " + parts +
                                ", a conversation at least " + in_units(states(1) + partial(1)) + ", and " +
                                gpu + "; take a smaller checkpoint or raise memory_limit");
    }
    throw MemoryBudgetError("a context of " + std::to_string(tokens) + " tokens needs " +
                            in_units(states(tokens) + partial(tokens)) + " of GPU memory; " + parts +
                            ", and " + gpu + ": " + std::to_string(most) +
                            " tokens would fit; lower max_context to that or raise memory_limit");
}

}  // namespace lily::metal
