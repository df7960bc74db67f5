// The GPU: what it is, what it may use, and memory on it.
//
// Buffers are shared with the CPU and not tracked by Metal: a CommandStream orders what launches do with
// them, and the host touches them only before a commit or after Completion::wait().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "backend/metal/owned.h"

namespace MTL {
class Buffer;
class Device;
class ResidencySet;
}  // namespace MTL

namespace lily::metal {

class Memory;

// Owned memory of the GPU, zero when made, page-aligned. Moves; frees itself when the last command buffer
// that uses it is done.
class DeviceBuffer {
  public:
    DeviceBuffer();
    ~DeviceBuffer();
    DeviceBuffer(DeviceBuffer&&) noexcept;
    DeviceBuffer& operator=(DeviceBuffer&&) noexcept;

    explicit operator bool() const { return handle_.get() != nullptr; }
    std::byte* contents() const { return contents_; }
    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(contents_);
    }
    size_t size() const { return size_; }  // bytes asked for
    const std::string& label() const { return label_; }
    MTL::Buffer* handle() const { return handle_.get(); }

  private:
    friend class Device;
    void release();

    std::shared_ptr<Memory> memory_;  // accounts for the bytes
    Owned<MTL::Buffer> handle_;
    std::byte* contents_ = nullptr;
    size_t size_ = 0;
    size_t reserved_ = 0;  // whole pages
    std::string label_;
};

// Any thread may call.
class Device {
  public:
    // The system's GPU. `budget` limits the bytes of all buffers together, which are never more than the
    // system recommends; 0 means as many. BackendError if there is no GPU, or it is older than M1, or the
    // system older than macOS 14.
    explicit Device(uint64_t budget = 0);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // MemoryBudgetError, before anything is allocated, if the budget or the largest buffer is exceeded; also
    // if the system has no memory.
    DeviceBuffer allocate(size_t bytes, std::string_view label);
    // The same over memory of the host, whole pages of the system from a page's beginning on, which must stay
    // there for as long as the buffer and what was launched with it.
    // Launches are ordered by buffer: within a pass, use one buffer for the same memory.
    DeviceBuffer adopt(std::byte* memory, size_t bytes, std::string_view label);
    // MemoryBudgetError unless `bytes` more fit into the budget: for asking once before many allocations.
    void require(uint64_t bytes, std::string_view what) const;
    // Bytes that a buffer of so many takes of the budget.
    static uint64_t whole_pages(uint64_t bytes);
    // Buffers made so far stay resident from here on (macOS 15; before, the system decides). A stream calls
    // it.
    void make_resident();

    const std::string& name() const { return name_; }                  // "Apple M4 Max"
    const std::string& architecture() const { return architecture_; }  // "applegpu_g16s"
    int family() const { return family_; }                             // 7 is M1, 8 M2, 9 M3 and M4, 10 M5
    uint64_t working_set() const { return working_set_; }              // bytes the system recommends at most
    uint64_t largest_buffer() const { return largest_buffer_; }
    uint64_t budget() const { return budget_; }
    uint64_t allocated() const;
    MTL::Device* handle() const { return handle_.get(); }
    MTL::ResidencySet* residency() const;  // null before macOS 15

  private:
    DeviceBuffer make(size_t bytes, std::string_view label, std::byte* memory);

    Owned<MTL::Device> handle_;
    std::shared_ptr<Memory> memory_;
    std::string name_, architecture_;
    int family_ = 0;
    uint64_t working_set_ = 0, largest_buffer_ = 0, budget_ = 0;
};

// "1.25 MiB".
std::string in_units(uint64_t bytes);

// Why Metal can't be used here, or "".
std::string unavailable_reason();

// Whether the system is at least macOS major.minor: ask before using newer API.
bool system_at_least(int major, int minor = 0);

}  // namespace lily::metal
