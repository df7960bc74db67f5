// Choices of tokens as the kernels take and give them.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "backend/choice.h"
#include "backend/metal/step.h"

namespace lily::metal {

SampleOptions sample_options(const Choice& choice);

// The token of a choice, or kNoToken. BackendError for the key of a row whose logits aren't numbers.
int32_t chosen_token(uint32_t token, uint32_t key);

// What choices depend on beside logits, in the GPU's memory: tokens counted so far, bias, masks. A slot for
// each choice; the GPU counts what it chooses, so that a slot is written once for a history.
class Adjustments {
  public:
    Adjustments(Device& device, CommandStream& stream) : device_(device), stream_(stream) {}

    // A slot that holds what a choice says, for whoever has this.
    class Slot {
      public:
        Slot(Adjustments& owner, size_t at) : owner_(&owner), at_(at) {}
        Slot(Slot&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)), at_(other.at_) {}
        Slot(const Slot&) = delete;
        ~Slot();
        uint32_t number() const { return static_cast<uint32_t>(at_); }
        // The GPU has counted `tokens` more and is done with it. Without this what the slot holds is
        // forgotten.
        void keep(int64_t tokens);

      private:
        Adjustments* owner_;
        size_t at_;
    };

    // For choices among `vocabulary` tokens. MemoryBudgetError if there is no room for another slot.
    Slot take(const Choice& choice, uint32_t vocabulary);
    // The tables, for `slots` of a launch; they move when a slot is taken.
    Chosen::Adjusted tables(const Range& slots) const;

  private:
    struct Held {
        uint64_t history = 0;  // 0: nothing of worth
        int64_t counted = 0;
        uint64_t used = 0;  // when, in calls of take()
        bool taken = false;
    };

    size_t find(const Choice& choice);
    void grow();
    void write(const Choice& choice, size_t at);

    Device& device_;
    CommandStream& stream_;
    uint32_t vocabulary_ = 0;
    std::deque<Held> slots_;
    uint64_t calls_ = 0;
    DeviceBuffer counts_, bias_;  // [slots, vocabulary]
    DeviceBuffer masks_;          // [slots, words]
};

}  // namespace lily::metal
