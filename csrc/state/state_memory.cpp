#include "state/state_memory.h"

#include <sys/mman.h>

#include <new>
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

// Straight from the system: zero without being written, in huge pages where there are such, which makes a
// snapshot of a large model several times cheaper; and given back as soon as it is freed.
class MappedBlock final : public StateBlock {
  public:
    explicit MappedBlock(size_t bytes) : StateBlock(map(bytes), bytes) {}
    ~MappedBlock() override { munmap(data(), size()); }

  private:
    static std::byte* map(size_t bytes) {
        void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(data, bytes, MADV_HUGEPAGE);
#endif
        return static_cast<std::byte*>(data);
    }
};

constexpr size_t kMappedFrom = 4 << 20;

class HeapMemory final : public StateMemory {
  public:
    std::unique_ptr<StateBlock> allocate(StateUse, size_t bytes) override {
        if (bytes >= kMappedFrom) return std::make_unique<MappedBlock>(bytes);
        return std::make_unique<HeapBlock>(Buffer<std::byte>(bytes));
    }
};

}  // namespace

std::shared_ptr<StateMemory> heap_memory() {
    static const auto heap = std::make_shared<HeapMemory>();
    return heap;
}

}  // namespace lily
