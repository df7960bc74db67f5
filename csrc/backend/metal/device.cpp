#include "backend/metal/device.h"

#include <Metal/Metal.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <utility>

#include "backend/metal/autorelease.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr size_t kPage = 16384;   // of Apple's chips
constexpr int kOldestFamily = 7;  // M1
constexpr int kNewestFamily = 30;
constexpr int kOldestSystem = 14;

Owned<MTL::Device> system_device() {
    auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
    if (device) return device;
    // Sessions without a display have no default.
    const auto all = NS::TransferPtr(MTL::CopyAllDevices());
    return all && all->count() > 0 ? NS::RetainPtr(all->object<MTL::Device>(0)) : device;
}

int newest_family(MTL::Device* device) {
    for (int family = kNewestFamily; family > 0; --family) {
        if (device->supportsFamily(static_cast<MTL::GPUFamily>(MTL::GPUFamilyApple1 + family - 1)))
            return family;
    }
    return 0;
}

Owned<MTL::ResidencySet> new_residency_set(MTL::Device* device) {
    if (!system_at_least(15)) return {};
    const auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
    NS::Error* error = nullptr;
    auto set = NS::TransferPtr(device->newResidencySet(descriptor.get(), &error));
    if (!set) throw BackendError("Metal made no residency set: " + reason_of(error));
    return set;
}

}  // namespace

std::string in_units(uint64_t bytes) {
    static constexpr const char* units[] = {"KiB", "MiB", "GiB"};
    double amount = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    for (; amount >= 1024 && unit + 1 < std::size(units); ++unit) amount /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, "%.2f %s", amount, units[unit]);
    return text;
}

// Counts bytes against the budget and keeps buffers resident. Outlives the device while buffers do.
class Memory {
  public:
    Memory(uint64_t budget, Owned<MTL::ResidencySet> residency)
        : budget_(budget), residency_(std::move(residency)) {}

    void require(uint64_t bytes, std::string_view what) const {
        const std::lock_guard lock(mutex_);
        check(bytes, what);
    }
    void reserve(uint64_t bytes, std::string_view what) {
        const std::lock_guard lock(mutex_);
        check(bytes, what);
        allocated_ += bytes;
    }
    void add(const MTL::Buffer* buffer) {
        const std::lock_guard lock(mutex_);
        if (!residency_) return;
        residency_->addAllocation(buffer);
        changed_ = true;
    }
    void remove(const MTL::Buffer* buffer, uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        allocated_ -= bytes;
        if (!residency_ || !buffer) return;
        residency_->removeAllocation(buffer);
        residency_->commit();  // until then the set holds the buffer
    }
    void make_resident() {
        const std::lock_guard lock(mutex_);
        if (!std::exchange(changed_, false)) return;
        residency_->commit();
        residency_->requestResidency();
    }
    uint64_t allocated() const {
        const std::lock_guard lock(mutex_);
        return allocated_;
    }
    MTL::ResidencySet* residency() const { return residency_.get(); }

  private:
    void check(uint64_t bytes, std::string_view what) const {
        if (bytes <= budget_ - allocated_) return;
        throw MemoryBudgetError(std::string(what) + " needs " + in_units(bytes) + " of GPU memory, " +
                                in_units(budget_ - allocated_) + " of " + in_units(budget_) +
                                " are left; take a smaller model or context, or raise the memory budget");
    }

    mutable std::mutex mutex_;
    uint64_t budget_, allocated_ = 0;
    Owned<MTL::ResidencySet> residency_;
    bool changed_ = false;
};

DeviceBuffer::DeviceBuffer() = default;
DeviceBuffer::~DeviceBuffer() { release(); }

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
    if (this == &other) return *this;
    release();
    memory_ = std::move(other.memory_);
    handle_ = std::move(other.handle_);
    contents_ = std::exchange(other.contents_, nullptr);
    size_ = std::exchange(other.size_, 0);
    reserved_ = std::exchange(other.reserved_, 0);
    label_ = std::move(other.label_);
    return *this;
}

void DeviceBuffer::release() {
    if (!memory_) return;
    memory_->remove(handle_.get(), reserved_);
    handle_.reset();
    memory_.reset();
}

Device::Device(uint64_t budget) {
    const AutoreleaseScope scope;
    if (!system_at_least(kOldestSystem)) {
        throw BackendError("Metal needs macOS " + std::to_string(kOldestSystem) + " or newer here, this is " +
                           to_std(NS::ProcessInfo::processInfo()->operatingSystemVersionString()));
    }
    handle_ = system_device();
    if (!handle_) throw BackendError("the system has no Metal device");
    name_ = to_std(handle_->name());
    architecture_ = to_std(handle_->architecture()->name());
    family_ = newest_family(handle_.get());
    if (family_ < kOldestFamily) {
        throw BackendError("the GPU " + name_ + " is older than Apple's M1, which the kernels need");
    }
    working_set_ = handle_->recommendedMaxWorkingSetSize();
    largest_buffer_ = handle_->maxBufferLength();
    budget_ = budget > 0 ? std::min(budget, working_set_) : working_set_;
    memory_ = std::make_shared<Memory>(budget_, new_residency_set(handle_.get()));
}

Device::~Device() = default;

uint64_t Device::whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

DeviceBuffer Device::allocate(size_t bytes, std::string_view label) { return make(bytes, label, nullptr); }

DeviceBuffer Device::adopt(std::byte* memory, size_t bytes, std::string_view label) {
    return make(bytes, label, memory);
}

DeviceBuffer Device::make(size_t bytes, std::string_view label, std::byte* memory) {
    const AutoreleaseScope scope;
    const std::string name(label);
    if (bytes == 0) throw BackendError("the buffer '" + name + "' would be empty");
    const uint64_t reserved = whole_pages(bytes);
    if (reserved > largest_buffer_) {
        throw MemoryBudgetError("the buffer '" + name + "' needs " + in_units(reserved) + ", " + name_ +
                                " allows at most " + in_units(largest_buffer_) + " in one");
    }
    memory_->reserve(reserved, "the buffer '" + name + "'");
    DeviceBuffer buffer;
    buffer.memory_ = memory_;
    buffer.reserved_ = reserved;
    constexpr auto kOptions = MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked;
    buffer.handle_ = NS::TransferPtr(memory ? handle_->newBuffer(memory, bytes, kOptions, nullptr)
                                            : handle_->newBuffer(reserved, kOptions));
    if (!buffer.handle_) {
        throw MemoryBudgetError("the system has no memory for the buffer '" + name + "' of " +
                                in_units(reserved));
    }
    buffer.handle_->setLabel(to_ns(name));
    buffer.contents_ = static_cast<std::byte*>(buffer.handle_->contents());
    buffer.size_ = bytes;
    buffer.label_ = name;
    memory_->add(buffer.handle_.get());
    return buffer;
}

void Device::require(uint64_t bytes, std::string_view what) const { memory_->require(bytes, what); }

void Device::make_resident() {
    const AutoreleaseScope scope;
    memory_->make_resident();
}

uint64_t Device::allocated() const { return memory_->allocated(); }

MTL::ResidencySet* Device::residency() const { return memory_->residency(); }

std::string unavailable_reason() {
    try {
        const Device device;
    } catch (const BackendError& error) {
        return error.what();
    }
    return "";
}

bool system_at_least(int major, int minor) {
    const AutoreleaseScope scope;
    const auto reported = [](int major, int minor) {
        return NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(
            NS::OperatingSystemVersion{major, minor, 0});
    };
    // A program linked for an older system, as most Pythons are, is told 16 for 26.
    return reported(major, minor) || (major >= 26 && !reported(26, 0) && reported(major - 10, minor));
}

}  // namespace lily::metal
