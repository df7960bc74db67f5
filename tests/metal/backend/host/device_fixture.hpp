// What the programs on the device layer share: small kernels, and buffers of floats.
#pragma once
#include <chrono>
#include <initializer_list>
#include <thread>
#include <vector>

#include "backend/metal/command.h"
#include "backend/metal/device.h"
#include "backend/metal/kernel_library.h"
#include "base/error.h"
#include "check.hpp"
#include "metalsim.h"

namespace metal = lily::metal;
using metal::Access, metal::constant, metal::reads, metal::unused, metal::updates, metal::writes;

inline const metal::KernelSource arithmetic{"arithmetic", R"(
#include <metal_stdlib>
using namespace metal;
#ifndef STEP
#define STEP 1.0f
#endif
constant float scale [[function_constant(0)]];
kernel void add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                device float* out [[buffer(2)]], constant uint& n [[buffer(3)]],
                uint i [[thread_position_in_grid]]) {
    if (i < n) out[i] = a[i] + b[i];
}
kernel void advance(device float* a [[buffer(0)]], constant uint& n [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
    if (i < n) a[i] += STEP;
}
kernel void scaled(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] *= scale; }
)"};

inline const metal::KernelSource broken{"broken", R"(
#include <metal_stdlib>
kernel void k(device float* a [[buffer(0)]]) { a[0] = nope; }
)"};

constexpr uint32_t kCount = 64;

struct Gpu {
    explicit Gpu(metal::StreamOptions options = {}) : stream(device, options) {}

    metal::Device device;
    metal::Kernels kernels{device, {}, std::span(&arithmetic, 1)};
    metal::CommandStream stream;
    const metal::Kernel& add = kernels.get("arithmetic", "add");
    const metal::Kernel& advance = kernels.get("arithmetic", "advance");

    metal::DeviceBuffer floats(float value, size_t count = kCount) {
        metal::DeviceBuffer buffer = device.allocate(count * sizeof(float), "floats");
        std::fill_n(buffer.as<float>(), count, value);
        return buffer;
    }
    // Launches with true declarations unless others are given.
    void launch_add(metal::Pass& pass, const metal::Range& a, const metal::Range& b,
                    const metal::Range& out) {
        const auto n = static_cast<uint32_t>(out.bytes / sizeof(float));
        pass.launch(add, {reads(a), reads(b), writes(out), constant(n)}, {(n + 31) / 32}, {32});
    }
    void launch_advance(metal::Pass& pass, const metal::Range& a) {
        const auto n = static_cast<uint32_t>(a.bytes / sizeof(float));
        pass.launch(advance, {updates(a), constant(n)}, {(n + 31) / 32}, {32});
    }
};

inline bool all(const metal::DeviceBuffer& buffer, float value) {
    for (size_t i = 0; i < buffer.size() / sizeof(float); ++i) {
        if (buffer.as<float>()[i] != value) return false;
    }
    return true;
}

// The queue's thread lets go of its last command buffer a moment after that is done.
inline void check_nothing_is_left() {
    for (int i = 0; i < 200 && metalsim_live_objects("MTLCommandBuffer") > 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    check(metalsim_live_objects("MTLBuffer") == 0 && metalsim_allocated_bytes() == 0, "no memory is left");
    check(metalsim_live_objects("MTLCommandBuffer") == 0, "no command buffer is left");
    for (const char* name : {"MTLLibrary", "MTLComputePipelineState", "MTLFence", "MTLResidencySet"}) {
        check(metalsim_live_objects(name) == 0, std::string("no ") + name + " is left");
    }
}
