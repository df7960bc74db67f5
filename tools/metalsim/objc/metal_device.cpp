// MTLDevice and MTLBuffer.
#include <ctime>

#include "config.hpp"
#include "faults.hpp"
#include "metal.hpp"

#define EXPORT __attribute__((visibility("default")))

namespace metalsim::objc {

using Lock = std::lock_guard<std::recursive_mutex>;

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

Uint3 to_uint3(Size s, const char* what) {
    if (s.width > UINT32_MAX || s.height > UINT32_MAX || s.depth > UINT32_MAX)
        misuse(std::string(what) + " is too large");
    return {uint32_t(s.width), uint32_t(s.height), uint32_t(s.depth)};
}

Device* system_device() {
    static Device* device = make<Device>("MTLDevice");
    return device;
}

namespace {

// MTLResourceOptions
constexpr unsigned long storage_mask = 0xF0, storage_private = 0x20, hazard_mask = 0x300, untracked = 0x100;
constexpr unsigned long vm_page = 16384;  // of Apple's chips

MetalBuffer* wrap(Buffer* buffer, unsigned long options) {
    if (!buffer) return nullptr;
    auto* b = make<MetalBuffer>("MTLBuffer");
    b->buffer = buffer;
    b->options = options;
    return b;
}

arena::Options arena_options(unsigned long options) {
    // The host can't write private memory: there uninitialised reads are certain.
    return {.name = "MTLBuffer",
            .tracked = (options & hazard_mask) != untracked,
            .track_initialisation = (options & storage_mask) == storage_private};
}

MetalBuffer* new_buffer(unsigned long length, unsigned long options) {
    if (length == 0) misuse("newBufferWithLength: zero length");
    if (faults::strike("buffer") || length > config().max_buffer) return nullptr;
    Lock lock(device_mutex());
    return wrap(arena::allocate(length, arena_options(options)), options);
}

bool supports_family(unsigned long family) {
    // MTLGPUFamily: Apple1 = 1001 ..., Mac2 = 2002, Common1..3 = 3001..3003, Metal3 = 5001, Metal4 = 5002
    if (family >= 1001 && family < 1100) return long(family) - 1000 <= config().apple_family();
    if (family == 5001) return true;
    if (family == 5002) return config().macos_major >= 26;
    return family == 2002 || (family >= 3001 && family <= 3003);
}

}  // namespace

void MetalBuffer::finish() {
    {
        Lock lock(device_mutex());
        arena::release(buffer);
    }
    if (deallocate) deallocate();
}

void declare_device() {
    const char* D = "MTLDevice";
    declare_class<Device>(D);
    method(D, "name", [](Device*, SEL) { return autoreleased(new_string("Simulated GPU")); });
    method(D, "registryID", [](Device*, SEL) { return uint64_t(1); });
    method(D, "architecture", [](Device*, SEL) {
        auto* a = make<Object>("MTLArchitecture");
        a->label = config().architecture();
        return autoreleased(a);
    });
    declare_class<Object>("MTLArchitecture");
    method("MTLArchitecture", "name", [](Object* a, SEL) { return autoreleased(new_string(a->label)); });
    method(D, "hasUnifiedMemory", [](Device*, SEL) { return true; });
    method(D, "isLowPower", [](Device*, SEL) { return false; });
    method(D, "isRemovable", [](Device*, SEL) { return false; });
    method(D, "isHeadless", [](Device*, SEL) { return false; });
    method(D, "supportsFamily:", [](Device*, SEL, unsigned long f) { return supports_family(f); });
    method(D, "supportsCounterSampling:", [](Device*, SEL, unsigned long) { return false; });
    method(D, "maxBufferLength", [](Device*, SEL) { return config().max_buffer.load(); });
    method(D, "recommendedMaxWorkingSetSize", [](Device*, SEL) { return config().working_set.load(); });
    method(D, "maxThreadgroupMemoryLength",
           [](Device*, SEL) { return static_cast<unsigned long>(config().max_threadgroup_memory); });
    method(D, "maxThreadsPerThreadgroup", [](Device*, SEL) { return Size{1024, 1024, 1024}; });
    method(D, "currentAllocatedSize", [](Device*, SEL) {
        Lock lock(device_mutex());
        return static_cast<unsigned long>(arena::allocated_bytes());
    });

    method(D, "newBufferWithLength:options:", [](Device*, SEL, unsigned long n, unsigned long options) {
        return new_buffer(n, options);
    });
    method(D, "newBufferWithBytes:length:options:",
           [](Device*, SEL, const void* bytes, unsigned long n, unsigned long options) {
               MetalBuffer* b = new_buffer(n, options);
               if (b) memcpy(b->buffer->base, bytes, n);
               return b;
           });
    method(D, "newBufferWithBytesNoCopy:length:options:deallocator:",
           [](Device*, SEL, void* bytes, unsigned long n, unsigned long options,
              const void* block) -> MetalBuffer* {
               bool aligned = reinterpret_cast<uintptr_t>(bytes) % vm_page == 0 && n % vm_page == 0 && n > 0;
               if (!aligned || faults::strike("buffer") || n > config().max_buffer) return nullptr;
               Lock lock(device_mutex());
               MetalBuffer* b = wrap(arena::adopt(bytes, n, arena_options(options)), options);
               if (b && block)
                   b->deallocate = [closure = Closure<void*, unsigned long>(block), bytes, n] {
                       closure(bytes, n);
                   };
               return b;
           });

    const char* B = "MTLBuffer";
    declare_class<MetalBuffer>(B);
    method(B, "contents", [](MetalBuffer* b, SEL) -> void* {
        return (b->options & storage_mask) == storage_private ? nullptr : b->buffer->base;
    });
    method(B, "length", [](MetalBuffer* b, SEL) { return static_cast<unsigned long>(b->buffer->length); });
    method(B, "allocatedSize", [](MetalBuffer* b, SEL) {
        return static_cast<unsigned long>((b->buffer->length + vm_page - 1) / vm_page * vm_page);
    });
    method(B, "gpuAddress", [](MetalBuffer* b, SEL) { return reinterpret_cast<uint64_t>(b->buffer->base); });
    method(B, "resourceOptions", [](MetalBuffer* b, SEL) { return b->options; });
    method(B, "storageMode", [](MetalBuffer* b, SEL) { return (b->options & storage_mask) >> 4; });
    method(B, "cpuCacheMode", [](MetalBuffer* b, SEL) { return b->options & 0xF; });
    method(B, "hazardTrackingMode", [](MetalBuffer* b, SEL) { return (b->options & hazard_mask) >> 8; });
    method(B, "device", [](MetalBuffer*, SEL) { return system_device(); });
    method(B, "didModifyRange:", [](MetalBuffer*, SEL, Range) {});
    method(B, "setPurgeableState:", [](MetalBuffer*, SEL, unsigned long) { return 2ul; });
    method(B, "label", [](MetalBuffer* b, SEL) { return autoreleased(new_string(b->label)); });
    method(B, "setLabel:", [](MetalBuffer* b, SEL, Object* label) {
        Lock lock(device_mutex());
        b->label = text_of(label);
        b->buffer->name = b->label;
    });
}

}  // namespace metalsim::objc

extern "C" {
EXPORT void* MTLCreateSystemDefaultDevice() {
    objc_lookUpClass("NSObject");
    return metalsim::objc::retained(metalsim::objc::system_device());
}
EXPORT void* MTLCopyAllDevices() {
    objc_lookUpClass("NSObject");
    return metalsim::objc::new_array({metalsim::objc::retained(metalsim::objc::system_device())});
}
EXPORT void* MTLCopyAllDevicesWithObserver(void*, void*) { return MTLCopyAllDevices(); }
EXPORT void MTLRemoveDeviceObserver(void*) {}
EXPORT void MTLIOCompressionContextAppendData() {
    metalsim::objc::misuse("MTLIO is not implemented by the simulator");
}
EXPORT void MTLIOCreateCompressionContext() {
    metalsim::objc::misuse("MTLIO is not implemented by the simulator");
}
EXPORT void MTLIOFlushAndDestroyCompressionContext() {
    metalsim::objc::misuse("MTLIO is not implemented by the simulator");
}
EXPORT void MTLIOCompressionContextDefaultChunkSize() {
    metalsim::objc::misuse("MTLIO is not implemented by the simulator");
}
}
