#include "state/state_memory.h"

#include <utility>

#include "base/buffer.h"

namespace lily {
namespace {

class HeapBlock final : public StateBlock {
  public:
    explicit HeapBlock(Buffer<std::byte> bytes)
        : StateBlock(bytes.data(), bytes.size()), bytes_(std::move(bytes)) {}

  private:
    Buffer<std::byte> bytes_;
};

class HeapMemory final : public StateMemory {
  public:
    std::unique_ptr<StateBlock> allocate(StateUse, size_t bytes) override {
        return std::make_unique<HeapBlock>(Buffer<std::byte>(bytes));
    }
};

}  // namespace

std::shared_ptr<StateMemory> heap_memory() {
    static const auto heap = std::make_shared<HeapMemory>();
    return heap;
}

}  // namespace lily
