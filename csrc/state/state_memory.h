// Memory that states live in: the heap, or what a backend supplies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lily {

// An owned piece, zero when made, that stays where it is. Readable by the host.
class StateBlock {
  public:
    virtual ~StateBlock() = default;
    StateBlock(const StateBlock&) = delete;
    StateBlock& operator=(const StateBlock&) = delete;
    std::byte* data() const { return data_; }
    size_t size() const { return size_; }

  protected:
    StateBlock(std::byte* data, size_t size) : data_(data), size_(size) {}

  private:
    std::byte* data_;
    size_t size_;
};

enum class StateUse : uint8_t { page, recurrent };

// Any thread may call; blocks may outlive the backend.
class StateMemory {
  public:
    virtual ~StateMemory() = default;
    // MemoryBudgetError or std::bad_alloc if there is no room.
    virtual std::unique_ptr<StateBlock> allocate(StateUse use, size_t bytes) = 0;
};

std::shared_ptr<StateMemory> heap_memory();

}  // namespace lily
