// Injected faults reach the host as they would come from Metal.
#include "check.hpp"
#include "gpu.hpp"
#include "metalsim.h"

namespace {

const char* const source = R"(
#include <metal_stdlib>
using namespace metal;
kernel void set(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] = 1.0f; }
kernel void large(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    threadgroup float s[9000];
    s[i] = 1;
    a[i] = s[i];
}
)";

std::string run(gpu::Gpu& gpu, const gpu::Owned<MTL::Buffer>& data, long* code = nullptr) {
    gpu::Pool pool;
    auto set = gpu.pipeline("set");
    auto* c = gpu.queue->commandBuffer();
    auto* e = c->computeCommandEncoder(MTL::DispatchTypeConcurrent);
    e->setComputePipelineState(set.get());
    e->setBuffer(data.get(), 0, 0);
    e->dispatchThreads(MTL::Size(4, 1, 1), MTL::Size(4, 1, 1));
    e->endEncoding();
    std::string error = error_of([&] { gpu::finish(c); });
    if (code && c->error()) *code = c->error()->code();
    return error;
}

}  // namespace

int main() {
    gpu::Pool pool;
    gpu::Gpu gpu;
    metalsim_fault("library", 1, 1, 1);
    check(contains(error_of([&] { gpu.load(source); }), "injected"), "a library that does not compile");
    gpu.load(source);
    check(gpu.library.get() != nullptr, "the next one compiles");

    metalsim_fault("buffer", 2, 1, 2);
    int refused = 0;
    for (int i = 0; i < 4; i++) refused += error_of([&] { gpu.buffer(64); }).empty() ? 0 : 1 << i;
    check(refused == 0b0110, "the second and third buffer are refused");

    metalsim_fault("pipeline", 1, 1, 1);
    check(contains(error_of([&] { gpu.pipeline("set"); }), "'set'"), "a pipeline that does not compile");
    check(contains(error_of([&] { gpu.pipeline("large"); }), "Threadgroup memory size (36000)"),
          "a pipeline with more than 32 KiB of threadgroup memory");
    metalsim_fault("function", 1, 1, 1);
    check(!error_of([&] { gpu.pipeline("set"); }).empty(), "a function that is not there");

    auto data = gpu.buffer(16);
    memset(data->contents(), 0, 16);
    long code = 0;
    metalsim_fault("command_buffer", 1, 8, 1);
    check(contains(run(gpu, data, &code), "injected") && code == 8,
          "a command buffer ends with the given code");
    check(gpu::contents<float>(data)[0] == 0, "a failed command buffer leaves its outputs stale");
    metalsim_fault("timeout", 1, 1, 1);
    check(!run(gpu, data, &code).empty() && code == 2, "a command buffer times out");
    check(run(gpu, data).empty() && gpu::contents<float>(data)[0] == 1, "the queue works on");

    for (const char* kind : {"queue", "event", "fence"}) metalsim_fault(kind, 1, 1, 1);
    check(!gpu.device->newCommandQueue() && !gpu.device->newSharedEvent() && !gpu.device->newFence(),
          "queues, events and fences are refused");
    check(metalsim_fault("unknown", 1, 1, 1) == 0, "an unknown kind is refused");

    metalsim_set_max_threads("set", 256);
    check(gpu.pipeline("set")->maxTotalThreadsPerThreadgroup() == 256,
          "the pipeline's limit is configurable");
    auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
    auto function = NS::TransferPtr(gpu.library->newFunction(gpu::text("set")));
    descriptor->setComputeFunction(function.get());
    descriptor->setMaxTotalThreadsPerThreadgroup(64);
    NS::Error* error = nullptr;
    auto pipeline = NS::TransferPtr(
        gpu.device->newComputePipelineState(descriptor.get(), MTL::PipelineOptionNone, nullptr, &error));
    check(pipeline->maxTotalThreadsPerThreadgroup() == 64, "a descriptor lowers it further");
    check(pipeline->threadExecutionWidth() == 32, "simdgroups have 32 lanes");
}
