// States in the GPU's memory: one growing pool of pages, and a buffer for each recurrent state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/metal/device.h"
#include "state/sequence.h"

namespace lily::metal {

// Inputs of the convolution that delta_rule.metal remembers.
constexpr int64_t kHistory = 16;

// The memory of a layout's states. Pages never move: they lie in one reserved range of addresses, and
// growing means a buffer over more of it; passes that were given the smaller one go on with it, over the same
// bytes.
class DeviceStates final : public StateMemory, public std::enable_shared_from_this<DeviceStates> {
  public:
    // `device` must live until the last block is gone.
    DeviceStates(std::shared_ptr<Device> device, size_t page_bytes);
    ~DeviceStates() override;

    std::unique_ptr<StateBlock> allocate(StateUse use, size_t bytes) override;

    // A buffer over all pages so far, which stays as it is while it is held: for encoding a pass. A page
    // begins at its number times its bytes.
    struct Held {
        std::unique_lock<std::mutex> lock;
        const DeviceBuffer* pages;
    };
    Held hold() { return {std::unique_lock(growing_), &pages_}; }
    // Called before a larger buffer takes the place of the one before, with the pages held.
    void before_growing(std::function<void()> call);

    // Of blocks that this class made.
    static uint32_t page_number(const StateBlock& page);
    static const DeviceBuffer& recurrent(StateBlock& block);

  private:
    class Page;
    class Recurrent;

    std::unique_ptr<StateBlock> allocate_page();
    void grow();

    std::shared_ptr<Device> device_;
    size_t page_bytes_;
    size_t reserved_ = 0;  // addresses
    std::byte* base_ = nullptr;
    std::mutex growing_;  // of pages_; taken after mutex_
    DeviceBuffer pages_;
    std::function<void()> before_growing_;
    std::mutex mutex_;            // of the numbers
    uint32_t used_ = 0;           // given out so far
    std::vector<uint32_t> free_;  // ... and given back
};

}  // namespace lily::metal
