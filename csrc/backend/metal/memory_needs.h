// What a model takes of the GPU's memory, by arithmetic: before anything is allocated.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/metal/buffers.h"
#include "backend/metal/switches.h"
#include "state/sequence.h"

namespace lily::metal {

struct MemoryNeeds {
    uint64_t limit;           // bytes of all buffers together
    uint64_t largest_buffer;  // keys and values of all conversations lie in one
    uint64_t weights;
    uint64_t steps;      // buffers for few rows, inputs of a pass, hidden rows for a draft head
    uint64_t block = 0;  // buffers for a block of a prompt
    Sizes sizes;
    Switches switches;
    std::vector<const StateLayout*> layouts;  // of a conversation's sequences: the model's, a draft head's
    int64_t positions;                        // most of a sequence

    uint64_t fixed() const { return weights + steps + block; }
    // Partial results of attention for steps at up to so many tokens.
    uint64_t partial(int64_t tokens) const;
    // Keys and values in whole pages, and recurrent states: the present one, a snapshot, and that of the step
    // ahead.
    uint64_t states(int64_t tokens) const;
    // The longest context that a conversation alone can reach, at most `positions`.
    int64_t fitting() const;
    // MemoryBudgetError, with what would fit, unless a conversation alone can reach `tokens`.
    void require(int64_t tokens) const;
};

}  // namespace lily::metal
