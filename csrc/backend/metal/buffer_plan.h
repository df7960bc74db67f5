// Memory that the operations of a block share, planned: one table for making it and for saying what it takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/metal/weights.h"

namespace lily::metal {

// When something is needed. What is never needed at the same time shares memory: a layer is a mixer, either a
// delta rule or attention, then a mixture or dense network, and the head comes when all layers are done.
enum class Needed : uint8_t { always, in_mixer, in_delta_rule, in_attention, in_mixture, at_end };

class BufferPlan {
  public:
    struct Part {
        std::string name;
        Needed needed;
        size_t bytes;
        std::vector<Placed*> to;
    };

    void add(std::string name, Needed needed, size_t bytes, Placed* to) {
        parts_.push_back({std::move(name), needed, bytes, {to}});
    }
    // In the same place as the part added last.
    void add_same(Placed* to) { parts_.back().to.push_back(to); }
    const std::vector<Part>& parts() const { return parts_; }
    // What is always needed, and the most of what is needed at one time.
    size_t bytes() const;
    // Says where everything lies in a buffer of so many bytes.
    void place(const DeviceBuffer& buffer) const;

  private:
    std::vector<size_t> offsets() const;

    std::vector<Part> parts_;
};

}  // namespace lily::metal
