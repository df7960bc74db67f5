// Lists of operations as steps, and how a pass is made of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "backend/metal/buffers.h"
#include "backend/metal/choosing.h"
#include "backend/metal/command.h"
#include "backend/metal/state.h"
#include "backend/metal/step.h"

namespace lily::metal {

// A list of operations as steps, for few rows of several sequences and for many rows of one.
struct Program {
    // `states` holds those of its sequences.
    Program(std::span<const Op> list, DeviceStates& states, Builder& builder);

    const Op* ops;
    DeviceStates& states;
    std::vector<std::unique_ptr<Step>> few;
    std::vector<std::unique_ptr<Step>> many;  // null where the step for few takes any number; empty: no form
    size_t head = 0;                          // the step that makes logits

    const Step& step(size_t i, bool with_many) const { return with_many && many[i] ? *many[i] : *few[i]; }
};

// Operations [first, end) of a program.
struct Stretch {
    const Program& program;
    size_t first, end;
};

// Encodes passes and hands them to the GPU.
class Passes {
  public:
    Passes(Device& device, CommandStream& stream, Buffers& buffers, const Sizes& sizes)
        : device_(device), stream_(stream), buffers_(buffers), sizes_(sizes), adjustments_(device, stream) {}

    Completion commit(const Stretch& stretch, bool many, Block& block);
    // Logits of more rows of the block.
    Completion commit_head(const Program& program, Block& block);
    void wait_idle() { stream_.wait_idle(); }
    Adjustments& adjustments() { return adjustments_; }
    // Tokens that a choice is made among.
    uint32_t vocabulary(const Choice& choice) const {
        return static_cast<uint32_t>(std::min<size_t>(static_cast<size_t>(choice.vocabulary), sizes_.logits));
    }
    Device& device() { return device_; }

  private:
    Device& device_;
    CommandStream& stream_;
    Buffers& buffers_;
    Sizes sizes_;
    Adjustments adjustments_;
};

}  // namespace lily::metal
