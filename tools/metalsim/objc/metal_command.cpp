// MTLCommandQueue and MTLCommandBuffer. Each queue has a thread that runs its command buffers in order.
#include <chrono>

#include "config.hpp"
#include "counters.hpp"
#include "diagnostics.hpp"
#include "faults.hpp"
#include "metal.hpp"

namespace metalsim::objc {

namespace {

const char* const command_domain = "MTLCommandBufferErrorDomain";
constexpr long internal_error = 1, timeout_error = 2, out_of_memory = 8;

std::mutex host_mutex;
PassSet host_passes;

CommandBuffer* new_command_buffer(Queue* q, bool retains) {
    {
        std::unique_lock lock(q->mutex);
        bool room =
            q->changed.wait_for(lock, std::chrono::seconds(30), [&] { return q->in_flight < q->limit; });
        if (!room)
            misuse("commandBuffer: " + std::to_string(q->limit) +
                   " command buffers of the queue are in flight and none completes");
        q->in_flight++;
    }
    auto* c = make<CommandBuffer>("MTLCommandBuffer");
    c->queue = retained(q);
    c->retains = retains;
    c->counted = true;
    return autoreleased(c);
}

void leave_queue(CommandBuffer* c) {
    if (!c->counted) return;
    c->counted = false;
    {
        std::lock_guard lock(c->queue->mutex);
        c->queue->in_flight--;
    }
    c->queue->changed.notify_all();
}

void enqueue(CommandBuffer* c) {
    if (c->status != not_enqueued) return;
    c->status = enqueued;
    retain(c);
    std::lock_guard lock(c->queue->mutex);
    c->queue->order.push_back(c);
}

void commit(CommandBuffer* c) {
    if (c->encoder_open) misuse("commit with an open encoder (missing endEncoding)");
    if (c->status >= committed) misuse("command buffer committed twice");
    enqueue(c);
    c->before = known_to_host();
    {
        std::lock_guard lock(c->queue->mutex);
        c->status = committed;
    }
    c->queue->changed.notify_all();
}

void wait(CommandBuffer* c, bool for_completion) {
    if (c->status < committed) misuse("waiting for a command buffer that was not committed");
    std::unique_lock lock(c->mutex);
    c->changed.wait(lock, [&] { return for_completion ? c->handlers_done : c->status >= scheduled; });
    if (for_completion) host_learns(c->all());
}

void call(const std::vector<Closure<CommandBuffer*>>& handlers, CommandBuffer* c) {
    for (const auto& handler : handlers) handler(c);
}

}  // namespace

PassSet known_to_host() {
    std::lock_guard lock(host_mutex);
    return host_passes;
}

void host_learns(const PassSet& passes) {
    std::lock_guard lock(host_mutex);
    host_passes.merge(passes);
    // A dense prefix is kept as a number.
    while (host_passes.more.count(host_passes.up_to + 1)) host_passes.more.erase(++host_passes.up_to);
}

void Queue::run() {
    for (;;) {
        CommandBuffer* c = nullptr;
        {
            std::unique_lock lock(mutex);
            changed.wait(lock,
                         [&] { return quit || (!order.empty() && order.front()->status >= committed); });
            if (order.empty() || order.front()->status < committed) return;
            c = order.front();
            order.pop_front();
        }
        c->execute();
        release(c);
    }
}

void Queue::finish() {
    {
        std::lock_guard lock(mutex);
        quit = true;
    }
    changed.notify_all();
    // The last reference may go away on the queue's own thread, with its last command buffer.
    if (worker.get_id() == std::this_thread::get_id())
        worker.detach();
    else
        worker.join();
}

void CommandBuffer::execute() {
    PoolScope pool;
    {
        std::lock_guard lock(mutex);
        status = scheduled;
    }
    changed.notify_all();
    call(scheduled_handlers, this);
    gpu_start = now();
    Failure failure;
    if (auto fault = faults::strike("timeout")) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        failure = {timeout_error, "injected fault: the GPU timed out"};
    } else if (auto fault = faults::strike("command_buffer")) {
        failure = {fault.code, "injected fault: the command buffer failed"};
    } else {
        {
            std::lock_guard lock(device_mutex());
            counters::totals().command_buffers++;
            if (arena::allocated_bytes() > config().working_set)
                failure = {out_of_memory, "insufficient memory: buffers exceed the recommended working set"};
        }
        for (auto& step : steps) {
            if (failure.code) break;
            failure = step();
        }
    }
    gpu_end = now();
    if (failure.code) error = new_error(command_domain, failure.code, failure.message);
    leave_queue(this);
    {
        std::lock_guard lock(mutex);
        status = error ? failed : completed;
    }
    if (!completed_handlers.empty()) {
        host_learns(all());
        call(completed_handlers, this);
    }
    {
        std::lock_guard lock(mutex);
        handlers_done = true;
    }
    changed.notify_all();
}

void CommandBuffer::finish() {
    leave_queue(this);
    for (Object* o : kept) release(o);
    release(error);
    release(queue);
    steps.clear();
    scheduled_handlers.clear();
    completed_handlers.clear();
}

void declare_command() {
    const char* D = "MTLDevice";
    auto new_queue = [](unsigned long limit) -> Queue* {
        if (faults::strike("queue")) return nullptr;
        auto* q = make<Queue>("MTLCommandQueue");
        q->limit = limit;
        q->worker = std::thread([q] { q->run(); });
        return q;
    };
    static auto make_queue = new_queue;
    method(D, "newCommandQueue", [](Device*, SEL) { return make_queue(64); });
    method(D, "newCommandQueueWithMaxCommandBufferCount:", [](Device*, SEL, unsigned long n) {
        return make_queue(n);
    });

    const char* Q = "MTLCommandQueue";
    declare_class<Queue>(Q);
    method(Q, "commandBuffer", [](Queue* q, SEL) { return new_command_buffer(q, true); });
    method(Q, "commandBufferWithUnretainedReferences",
           [](Queue* q, SEL) { return new_command_buffer(q, false); });
    method(Q, "commandBufferWithDescriptor:", [](Queue* q, SEL, Object* d) {
        return new_command_buffer(q, d->label != "unretained");
    });
    method(Q, "label", [](Queue* q, SEL) { return autoreleased(new_string(q->label)); });
    method(Q, "setLabel:", [](Queue* q, SEL, Object* label) { q->label = text_of(label); });
    method(Q, "device", [](Queue*, SEL) { return system_device(); });
    for (const char* s : {"addResidencySet:", "removeResidencySet:"})
        method(Q, s, [](Queue*, SEL, Object*) {});
    for (const char* s : {"addResidencySets:count:", "removeResidencySets:count:"})
        method(Q, s, [](Queue*, SEL, Object* const*, unsigned long) {});

    declare_class<Object>("MTLCommandBufferDescriptor");
    method("MTLCommandBufferDescriptor", "setErrorOptions:", [](Object*, SEL, unsigned long) {});
    method("MTLCommandBufferDescriptor", "setRetainedReferences:", [](Object* d, SEL, bool retains) {
        d->label = retains ? "" : "unretained";
    });

    const char* C = "MTLCommandBuffer";
    declare_class<CommandBuffer>(C);
    method(C, "enqueue", [](CommandBuffer* c, SEL) { enqueue(c); });
    method(C, "commit", [](CommandBuffer* c, SEL) { commit(c); });
    method(C, "waitUntilCompleted", [](CommandBuffer* c, SEL) { wait(c, true); });
    method(C, "waitUntilScheduled", [](CommandBuffer* c, SEL) { wait(c, false); });
    method(C, "addCompletedHandler:", [](CommandBuffer* c, SEL, const void* block) {
        if (c->status >= committed) misuse("addCompletedHandler after commit");
        c->completed_handlers.emplace_back(block);
    });
    method(C, "addScheduledHandler:", [](CommandBuffer* c, SEL, const void* block) {
        if (c->status >= committed) misuse("addScheduledHandler after commit");
        c->scheduled_handlers.emplace_back(block);
    });
    method(C, "status", [](CommandBuffer* c, SEL) {
        unsigned long s = c->status;
        if (s >= completed) host_learns(c->all());
        return s;
    });
    method(C, "error", [](CommandBuffer* c, SEL) { return c->error; });
    method(C, "GPUStartTime", [](CommandBuffer* c, SEL) { return c->gpu_start; });
    method(C, "GPUEndTime", [](CommandBuffer* c, SEL) { return c->gpu_end; });
    method(C, "kernelStartTime", [](CommandBuffer* c, SEL) { return c->gpu_start; });
    method(C, "kernelEndTime", [](CommandBuffer* c, SEL) { return c->gpu_end; });
    method(C, "retainedReferences", [](CommandBuffer* c, SEL) { return c->retains; });
    method(C, "commandQueue", [](CommandBuffer* c, SEL) { return c->queue; });
    method(C, "device", [](CommandBuffer*, SEL) { return system_device(); });
    method(C, "label", [](CommandBuffer* c, SEL) { return autoreleased(new_string(c->label)); });
    method(C, "setLabel:", [](CommandBuffer* c, SEL, Object* label) { c->label = text_of(label); });
    method(C, "pushDebugGroup:", [](CommandBuffer*, SEL, Object*) {});
    method(C, "popDebugGroup", [](CommandBuffer*, SEL) {});
    method(C, "useResidencySet:", [](CommandBuffer*, SEL, Object*) {});
    method(C, "useResidencySets:count:", [](CommandBuffer*, SEL, Object* const*, unsigned long) {});
    method(C, "encodeSignalEvent:value:", [](CommandBuffer* c, SEL, Event* e, uint64_t value) {
        if (c->encoder_open) misuse("encodeSignalEvent inside an encoder");
        c->keep(e);
        c->steps.push_back([=] {
            e->signal(value, c->all());
            return CommandBuffer::Failure{};
        });
    });
    method(C, "encodeWaitForEvent:value:", [](CommandBuffer* c, SEL, Event* e, uint64_t value) {
        if (c->encoder_open) misuse("encodeWait inside an encoder");
        c->keep(e);
        c->steps.push_back([=] {
            if (e->wait(value, config().wait_timeout, c->before)) return CommandBuffer::Failure{};
            return CommandBuffer::Failure{timeout_error, "the GPU timed out waiting for value " +
                                                             std::to_string(value) + " of an event"};
        });
    });
}

}  // namespace metalsim::objc
