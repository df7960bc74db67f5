#include "backend/metal/state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lily::metal {
namespace {

constexpr size_t kFirstPages = 16;
// More than any machine's GPU can use; only what is touched takes memory.
constexpr size_t kReservedAddresses = size_t{1} << 40;

size_t whole_pages(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

}  // namespace

class DeviceStates::Page final : public StateBlock {
  public:
    Page(std::shared_ptr<DeviceStates> states, uint32_t number)
        : StateBlock(states->base_ + number * states->page_bytes_, states->page_bytes_),
          number(number),
          states_(std::move(states)) {}
    ~Page() override {
        const std::lock_guard lock(states_->mutex_);
        states_->free_.push_back(number);
    }
    const uint32_t number;

  private:
    std::shared_ptr<DeviceStates> states_;
};

class DeviceStates::Recurrent final : public StateBlock {
  public:
    Recurrent(std::shared_ptr<Device> device, DeviceBuffer buffer, size_t bytes)
        : StateBlock(buffer.contents(), bytes), device_(std::move(device)), buffer(std::move(buffer)) {}

  private:
    std::shared_ptr<Device> device_;  // outlives the buffer

  public:
    const DeviceBuffer buffer;
};

DeviceStates::DeviceStates(std::shared_ptr<Device> device, size_t page_bytes)
    : device_(std::move(device)), page_bytes_(page_bytes) {
    if (page_bytes_ == 0) return;
    reserved_ = whole_pages(std::min<size_t>(kReservedAddresses, device_->largest_buffer()));
    void* base =
        mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        throw BackendError("no address range of " + std::to_string(reserved_) +
                           " bytes is left for keys and values");
    }
    base_ = static_cast<std::byte*>(base);
}

DeviceStates::~DeviceStates() {
    pages_ = DeviceBuffer();
    if (base_) munmap(base_, reserved_);
}

std::unique_ptr<StateBlock> DeviceStates::allocate(StateUse use, size_t bytes) {
    if (use == StateUse::page) return allocate_page();
    // Without recurrent layers there is still a block, of nothing.
    DeviceBuffer buffer;
    if (bytes > 0) {
        buffer = device_->allocate(bytes, "recurrent state");
        std::memset(buffer.contents(), 0, bytes);
    }
    return std::make_unique<Recurrent>(device_, std::move(buffer), bytes);
}

std::unique_ptr<StateBlock> DeviceStates::allocate_page() {
    std::unique_lock lock(mutex_);
    uint32_t number = used_;
    if (!free_.empty()) {
        number = free_.back();
        free_.pop_back();
    } else {
        if ((used_ + 1) * page_bytes_ > pages_.size()) grow();
        ++used_;
    }
    lock.unlock();
    auto page = std::make_unique<Page>(shared_from_this(), number);
    std::memset(page->data(), 0, page->size());
    return page;
}

// By a half, and no further than the budget allows as long as one page more fits.
void DeviceStates::grow() {
    const std::lock_guard lock(growing_);
    if (before_growing_) before_growing_();
    const size_t needed = (used_ + 1) * page_bytes_;
    const size_t wanted = std::max({kFirstPages * page_bytes_, pages_.size() + pages_.size() / 2, needed});
    for (size_t bytes = std::min(whole_pages(wanted), reserved_);; bytes = whole_pages(needed)) {
        try {
            pages_ = DeviceBuffer();  // its bytes count once
            pages_ = device_->adopt(base_, bytes, "keys and values");
            return;
        } catch (const MemoryBudgetError&) {
            if (bytes <= whole_pages(needed)) {
                if (used_ > 0)
                    pages_ = device_->adopt(base_, whole_pages(used_ * page_bytes_), "keys and values");
                throw;
            }
        }
    }
}

void DeviceStates::before_growing(std::function<void()> call) {
    const std::lock_guard lock(growing_);
    before_growing_ = std::move(call);
}

uint32_t DeviceStates::page_number(const StateBlock& page) { return static_cast<const Page&>(page).number; }

const DeviceBuffer& DeviceStates::recurrent(StateBlock& block) {
    return static_cast<Recurrent&>(block).buffer;
}

}  // namespace lily::metal
