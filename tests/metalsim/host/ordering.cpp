// What orders passes: tracked buffers by themselves, untracked ones by fences, events or the host.
#include <atomic>
#include <chrono>
#include <thread>

#include "check.hpp"
#include "gpu.hpp"
#include "metalsim.h"

namespace {

const char* const source = R"(
#include <metal_stdlib>
using namespace metal;
kernel void add(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] += 1.0f; }
)";

struct Test {
    gpu::Gpu gpu;
    gpu::Owned<MTL::ComputePipelineState> add;
    gpu::Owned<MTL::Buffer> data;

    void use(MTL::ResourceOptions options) {
        metalsim_diagnostics_clear();
        data = gpu.buffer(256, options | MTL::ResourceStorageModeShared);
        memset(data->contents(), 0, 256);
    }
    void encode(MTL::CommandBuffer* c, MTL::Fence* wait = nullptr, MTL::Fence* update = nullptr) {
        auto* e = c->computeCommandEncoder(MTL::DispatchTypeConcurrent);
        if (wait) e->waitForFence(wait);
        e->setComputePipelineState(add.get());
        e->setBuffer(data.get(), 0, 0);
        e->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(64, 1, 1));
        if (update) e->updateFence(update);
        e->endEncoding();
    }
    bool holds(float value) const { return gpu::contents<float>(data)[63] == value; }
    // Runs two passes that touch the same buffer.
    std::string two_passes(bool fence) {
        gpu::Pool pool;
        auto f = NS::TransferPtr(gpu.device->newFence());
        auto* c = gpu.queue->commandBuffer();
        encode(c, nullptr, fence ? f.get() : nullptr);
        encode(c, fence ? f.get() : nullptr);
        return error_of([&] { gpu::finish(c); });
    }
};

void passes(Test& t) {
    t.use(MTL::ResourceHazardTrackingModeDefault);
    check(t.two_passes(false).empty() && t.holds(2), "tracked buffers order passes");
    t.use(MTL::ResourceHazardTrackingModeUntracked);
    check(contains(t.two_passes(false), "dispatch-hazard"), "untracked buffers need a fence between passes");
    t.use(MTL::ResourceHazardTrackingModeUntracked);
    check(t.two_passes(true).empty() && t.holds(2), "a fence orders passes");
}

void command_buffers(Test& t) {
    gpu::Pool pool;
    t.use(MTL::ResourceHazardTrackingModeUntracked);
    auto* first = t.gpu.queue->commandBuffer();
    auto* second = t.gpu.queue->commandBuffer();
    t.encode(first);
    t.encode(second);
    first->commit();
    std::string error = error_of([&] { gpu::finish(second); });
    check(contains(error, "dispatch-hazard"), "command buffers that nobody orders are found");

    t.use(MTL::ResourceHazardTrackingModeUntracked);
    for (int i = 0; i < 2; i++) {
        auto* c = t.gpu.queue->commandBuffer();
        t.encode(c);
        error = error_of([&] { gpu::finish(c); });
    }
    check(error.empty() && t.holds(2), "waiting on the host orders command buffers");

    t.use(MTL::ResourceHazardTrackingModeUntracked);
    auto event = NS::TransferPtr(t.gpu.device->newEvent());
    first = t.gpu.queue->commandBuffer();
    second = t.gpu.queue->commandBuffer();
    t.encode(first);
    first->encodeSignalEvent(event.get(), 1);
    second->encodeWait(event.get(), 1);
    t.encode(second);
    first->commit();
    error = error_of([&] { gpu::finish(second); });
    check(error.empty() && t.holds(2), "an event orders command buffers: " + error);

    auto other = NS::TransferPtr(t.gpu.device->newCommandQueue());
    t.use(MTL::ResourceHazardTrackingModeUntracked);
    event = NS::TransferPtr(t.gpu.device->newEvent());
    second = other->commandBuffer();
    second->encodeWait(event.get(), 7);
    t.encode(second);
    second->commit();
    first = t.gpu.queue->commandBuffer();
    t.encode(first);
    first->encodeSignalEvent(event.get(), 7);
    first->commit();
    second->waitUntilCompleted();
    check(!second->error() && t.holds(2), "an event orders queues, also when the waiter comes first");
}

void shared_events(Test& t) {
    gpu::Pool pool;
    t.use(MTL::ResourceHazardTrackingModeUntracked);
    auto event = NS::TransferPtr(t.gpu.device->newSharedEvent());
    auto* c = t.gpu.queue->commandBuffer();
    t.encode(c);
    c->encodeSignalEvent(event.get(), 1);
    c->encodeWait(event.get(), 2);
    t.encode(c);
    std::atomic<int> notified{0};
    auto listener = NS::TransferPtr(MTL::SharedEventListener::alloc()->init());
    auto* seen = &notified;
    event->notifyListener(listener.get(), 1, ^(MTL::SharedEvent*, uint64_t value) {
      *seen = int(value);
    });
    c->commit();
    check(event->waitUntilSignaledValue(1, 5000) && t.holds(1), "the host waits for a shared event");
    for (int i = 0; i < 500 && notified == 0; i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    check(notified == 1, "the listener is called");
    check(c->status() < MTL::CommandBufferStatusCompleted, "the GPU waits for the host");
    event->setSignaledValue(2);
    c->waitUntilCompleted();
    check(event->signaledValue() == 2 && t.holds(2), "the host releases the GPU");
    check(!c->error(), "the shared event ordered the two passes");
    check(!event->waitUntilSignaledValue(99, 20), "a wait on the host can time out");

    metalsim_set_wait_timeout(0.2);
    auto* stuck = t.gpu.queue->commandBuffer();
    stuck->encodeWait(event.get(), 100);
    std::string error = error_of([&] { gpu::finish(stuck); });
    check(stuck->error() && stuck->error()->code() == 2, "a wait that nobody ends times out: " + error);
    metalsim_set_wait_timeout(10);
}

void handlers(Test& t) {
    gpu::Pool pool;
    t.use(MTL::ResourceHazardTrackingModeDefault);
    std::vector<std::string> calls;
    auto* c = t.gpu.queue->commandBuffer();
    c->addScheduledHandler([&](MTL::CommandBuffer*) { calls.push_back("scheduled"); });
    c->addCompletedHandler([&](MTL::CommandBuffer* b) {
        calls.push_back(b->status() == MTL::CommandBufferStatusCompleted ? "completed" : "error");
    });
    c->addCompletedHandler([&](MTL::CommandBuffer*) { calls.push_back("second"); });
    t.encode(c);
    gpu::finish(c);
    check(calls == std::vector<std::string>{"scheduled", "completed", "second"},
          "handlers are called in order before the wait ends");

    // Enqueued order holds whatever the order of commits.
    auto *a = t.gpu.queue->commandBuffer(), *b = t.gpu.queue->commandBuffer();
    std::vector<int> order;
    a->addCompletedHandler([&](MTL::CommandBuffer*) { order.push_back(1); });
    b->addCompletedHandler([&](MTL::CommandBuffer*) { order.push_back(2); });
    a->enqueue();
    b->enqueue();
    b->commit();
    a->commit();
    b->waitUntilCompleted();
    check(order == std::vector<int>{1, 2}, "command buffers run in the order of enqueue");
}

bool freed = false;  // by the deallocator of memory that the host lent

void memory(Test& t) {
    gpu::Pool pool;
    t.use(MTL::ResourceHazardTrackingModeDefault);
    void* pages = aligned_alloc(16384, 16384);
    memset(pages, 0, 16384);
    t.data = NS::TransferPtr(
        t.gpu.device->newBuffer(pages, 16384, MTL::ResourceStorageModeShared, ^(void*, NS::UInteger) {
          freed = true;
        }));
    auto* c = t.gpu.queue->commandBuffer();
    t.encode(c);
    gpu::finish(c);
    check(static_cast<float*>(pages)[63] == 1.0f, "kernels write memory of the host without a copy");
    check(!t.gpu.device->newBuffer(static_cast<char*>(pages) + 16, 16384, MTL::ResourceStorageModeShared,
                                   nullptr),
          "memory that is not on a page is refused");
    c = nullptr;
    t.data.reset();

    auto blit_target = t.gpu.buffer(256);
    t.data = t.gpu.buffer(256);
    memset(t.data->contents(), 0, 256);
    auto* d = t.gpu.queue->commandBuffer();
    t.encode(d);
    auto* e = d->blitCommandEncoder();
    e->copyFromBuffer(t.data.get(), 0, blit_target.get(), 0, 128);
    e->fillBuffer(blit_target.get(), NS::Range(128, 128), 0x11);
    e->endEncoding();
    gpu::finish(d);
    check(gpu::contents<float>(blit_target)[31] == 1.0f && gpu::contents<uint8_t>(blit_target)[255] == 0x11,
          "blits copy and fill");

    auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
    NS::Error* error = nullptr;
    auto set = NS::TransferPtr(t.gpu.device->newResidencySet(descriptor.get(), &error));
    set->addAllocation(t.data.get());
    check(set->allocatedSize() == 0, "a residency set changes with its commit");
    set->commit();
    set->requestResidency();
    t.gpu.queue->addResidencySet(set.get());
    check(set->allocatedSize() == 256 && set->containsAllocation(t.data.get()),
          "a residency set holds its allocations");

    metalsim_set_working_set(64);
    auto* full = t.gpu.queue->commandBuffer();
    t.encode(full);
    error_of([&] { gpu::finish(full); });
    check(full->error() && full->error()->code() == 8,
          "more memory than the working set is the error of the command buffer");
    metalsim_set_working_set(16ull << 30);
}

}  // namespace

int main() {
    gpu::Pool pool;
    Test t;
    t.gpu.load(source);
    t.add = t.gpu.pipeline("add");
    passes(t);
    command_buffers(t);
    shared_events(t);
    handlers(t);
    memory(t);
    check(freed, "the deallocator is called when the last user lets go");
    t.use(MTL::ResourceHazardTrackingModeDefault);
    check(t.gpu.device->supportsFamily(MTL::GPUFamilyApple7) &&
              !t.gpu.device->supportsFamily(MTL::GPUFamilyApple9),
          "the device has the configured family");
    check(NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({15, 0, 0}),
          "the system has the configured version");
    check(t.gpu.device->maxThreadsPerThreadgroup().width == 1024, "structures are returned");
}
