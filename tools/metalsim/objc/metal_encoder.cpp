// MTLComputeCommandEncoder and MTLBlitCommandEncoder.
#include "diagnostics.hpp"
#include "metal.hpp"

namespace metalsim::objc {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr long internal_error = 1, page_fault = 3;
constexpr unsigned long barrier_scope_buffers = 1, max_bytes = 4096;

void check_index(unsigned long index) {
    if (index >= max_bindings) misuse("binding index " + std::to_string(index) + " is above 30");
}

void set_buffer(CommandEncoder* e, MetalBuffer* b, unsigned long offset, unsigned long index) {
    check_index(index);
    if (!b) {
        e->commands.push_back([=](Encoder& x) { x.set_buffer(nullptr, 0, unsigned(index)); });
        return;
    }
    if (offset >= b->buffer->length)
        misuse("setBuffer: offset " + std::to_string(offset) + " is beyond the buffer");
    e->command_buffer->keep(b);
    Buffer* buffer = b->buffer;
    e->commands.push_back([=](Encoder& x) { x.set_buffer(buffer, offset, unsigned(index)); });
}

// Recording a dispatch: checks what Metal's validation would stop at once.
void record_dispatch(CommandEncoder* e, std::function<void(Encoder&)> command) {
    if (e->ended) misuse("dispatch after endEncoding");
    if (!e->pipeline) misuse("dispatch without a pipeline state");
    e->commands.push_back(std::move(command));
}

void use(CommandEncoder* e, Object* resource) {
    if (resource->isa->name != "MTLBuffer") return;
    e->command_buffer->keep(resource);
    Buffer* buffer = static_cast<MetalBuffer*>(resource)->buffer;
    e->commands.push_back([=](Encoder& x) { x.use(buffer); });
}

// Methods that all encoders have.
void declare_common(const char* E) {
    declare_class<CommandEncoder>(E);
    method(E, "endEncoding", [](CommandEncoder* e, SEL) { e->end(); });
    method(E, "label", [](CommandEncoder* e, SEL) { return autoreleased(new_string(e->label)); });
    method(E, "setLabel:", [](CommandEncoder* e, SEL, Object* label) { e->label = text_of(label); });
    method(E, "pushDebugGroup:", [](CommandEncoder*, SEL, Object*) {});
    method(E, "popDebugGroup", [](CommandEncoder*, SEL) {});
    method(E, "insertDebugSignpost:", [](CommandEncoder*, SEL, Object*) {});
    method(E, "device", [](CommandEncoder*, SEL) { return system_device(); });
    method(E, "updateFence:", [](CommandEncoder* e, SEL, Fence* f) {
        e->command_buffer->keep(f);
        e->updated_fences.push_back(f);
    });
    method(E, "waitForFence:", [](CommandEncoder* e, SEL, Fence* f) {
        e->command_buffer->keep(f);
        CommandBuffer* c = e->command_buffer;
        e->commands.push_back([=](Encoder&) {
            ordering::extend_pass(f->passes);
            c->before.merge(f->passes);
        });
    });
}

void declare_compute() {
    const char* E = "MTLComputeCommandEncoder";
    declare_common(E);
    method(E, "dispatchType", [](CommandEncoder* e, SEL) { return e->concurrent ? 1ul : 0ul; });
    method(E, "setComputePipelineState:", [](CommandEncoder* e, SEL, PipelineState* p) {
        if (!p) misuse("setComputePipelineState: nil");
        e->pipeline = p;
        e->command_buffer->keep(p);
        e->commands.push_back([=](Encoder& x) { x.set_pipeline(p->pipeline); });
    });
    method(E, "setBuffer:offset:atIndex:",
           [](CommandEncoder* e, SEL, MetalBuffer* b, unsigned long offset, unsigned long index) {
               set_buffer(e, b, offset, index);
           });
    method(E, "setBuffers:offsets:withRange:",
           [](CommandEncoder* e, SEL, MetalBuffer* const* list, const unsigned long* offsets, Range range) {
               for (unsigned long i = 0; i < range.length; i++)
                   set_buffer(e, list[i], offsets[i], range.location + i);
           });
    method(E,
           "setBufferOffset:atIndex:", [](CommandEncoder* e, SEL, unsigned long offset, unsigned long index) {
               check_index(index);
               e->commands.push_back([=](Encoder& x) { x.set_offset(offset, unsigned(index)); });
           });
    method(E, "setBytes:length:atIndex:",
           [](CommandEncoder* e, SEL, const char* bytes, unsigned long n, unsigned long index) {
               check_index(index);
               if (n > max_bytes) misuse("setBytes longer than 4096 bytes");
               std::vector<char> copy(bytes, bytes + n);
               e->commands.push_back([copy = std::move(copy), index](Encoder& x) {
                   x.set_bytes(copy.data(), copy.size(), unsigned(index));
               });
           });
    method(E, "setThreadgroupMemoryLength:atIndex:",
           [](CommandEncoder* e, SEL, unsigned long n, unsigned long index) {
               check_index(index);
               if (n % 16)
                   misuse("threadgroup memory length " + std::to_string(n) + " is not a multiple of 16");
               e->commands.push_back(
                   [=](Encoder& x) { x.set_threadgroup_memory(uint32_t(n), unsigned(index)); });
           });
    method(E, "dispatchThreads:threadsPerThreadgroup:", [](CommandEncoder* e, SEL, Size threads, Size group) {
        Uint3 t = to_uint3(threads, "the grid"), g = to_uint3(group, "the threadgroup");
        record_dispatch(e, [=](Encoder& x) { x.dispatch_threads(t, g); });
    });
    method(E, "dispatchThreadgroups:threadsPerThreadgroup:",
           [](CommandEncoder* e, SEL, Size groups, Size group) {
               Uint3 n = to_uint3(groups, "the grid"), g = to_uint3(group, "the threadgroup");
               record_dispatch(e, [=](Encoder& x) { x.dispatch_threadgroups(n, g); });
           });
    method(E, "dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:threadsPerThreadgroup:",
           [](CommandEncoder* e, SEL, MetalBuffer* b, unsigned long offset, Size group) {
               Uint3 g = to_uint3(group, "the threadgroup");
               e->command_buffer->keep(b);
               Buffer* buffer = b->buffer;
               record_dispatch(e, [=](Encoder& x) { x.dispatch_indirect(*buffer, offset, g); });
           });
    method(E, "memoryBarrierWithScope:", [](CommandEncoder* e, SEL, unsigned long scope) {
        if (scope & barrier_scope_buffers) e->commands.push_back([](Encoder& x) { x.barrier(); });
    });
    method(E, "memoryBarrierWithResources:count:",
           [](CommandEncoder* e, SEL, Object* const* resources, unsigned long n) {
               std::vector<Buffer*> buffers;
               for (unsigned long i = 0; i < n; i++)
                   if (resources[i]->isa->name == "MTLBuffer")
                       buffers.push_back(static_cast<MetalBuffer*>(resources[i])->buffer);
               e->commands.push_back([=](Encoder& x) { x.barrier(buffers); });
           });
    method(E, "useResource:usage:", [](CommandEncoder* e, SEL, Object* r, unsigned long) { use(e, r); });
    method(E, "useResources:count:usage:",
           [](CommandEncoder* e, SEL, Object* const* list, unsigned long n, unsigned long) {
               for (unsigned long i = 0; i < n; i++) use(e, list[i]);
           });
}

void declare_blit() {
    const char* E = "MTLBlitCommandEncoder";
    declare_common(E);
    method(
        E, "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
        [](CommandEncoder* e, SEL, MetalBuffer* from, unsigned long from_offset, MetalBuffer* to,
           unsigned long to_offset, unsigned long n) {
            if (from_offset + n > from->buffer->length || to_offset + n > to->buffer->length)
                misuse("copyFromBuffer reaches beyond a buffer");
            e->command_buffer->keep(from);
            e->command_buffer->keep(to);
            Buffer *source = from->buffer, *target = to->buffer;
            e->commands.push_back([=](Encoder& x) { x.copy(*source, from_offset, *target, to_offset, n); });
        });
    method(
        E, "fillBuffer:range:value:",
        [](CommandEncoder* e, SEL, MetalBuffer* b, Range range, unsigned char value) {
            if (range.location + range.length > b->buffer->length)
                misuse("fillBuffer reaches beyond the buffer");
            e->command_buffer->keep(b);
            Buffer* buffer = b->buffer;
            e->commands.push_back([=](Encoder& x) { x.fill(*buffer, range.location, range.length, value); });
        });
    method(E, "synchronizeResource:", [](CommandEncoder*, SEL, Object*) {});
}

}  // namespace

CommandEncoder* new_encoder(CommandBuffer* c, const char* cls, bool concurrent) {
    if (c->status >= committed) misuse("an encoder is made after commit");
    if (c->encoder_open) misuse("another encoder of this command buffer is still open");
    auto* e = make<CommandEncoder>(cls);
    e->command_buffer = retained(c);
    e->concurrent = concurrent;
    c->encoder_open = true;
    return autoreleased(e);
}

void CommandEncoder::end() {
    if (ended) misuse("endEncoding twice");
    ended = true;
    CommandBuffer* c = command_buffer;
    c->encoder_open = false;
    c->steps.push_back([c, concurrent = concurrent, commands = std::move(commands), fences = updated_fences] {
        Lock lock(device_mutex());
        uint64_t before = report_total();
        Encoder encoder(concurrent, c->before);
        for (auto& command : commands) command(encoder);
        c->own.add(encoder.pass());
        for (Fence* f : fences) f->passes = c->all();
        if (report_total() == before) return CommandBuffer::Failure{};
        std::string message = last_report();
        bool fault = message.rfind("out-of-bounds", 0) == 0 || message.rfind("null-buffer", 0) == 0;
        return CommandBuffer::Failure{fault ? page_fault : internal_error,
                                      message.empty() ? "a known report" : message};
    });
}

void CommandEncoder::finish() {
    if (!ended) misuse("command encoder released without endEncoding");
    release(command_buffer);
}

void declare_encoders() {
    declare_compute();
    declare_blit();
    const char* P = "MTLComputePassDescriptor";
    declare_class<Object>(P);
    class_method(P, "computePassDescriptor",
                 [](objc_class*, SEL) { return autoreleased(make<Object>("MTLComputePassDescriptor")); });
    method(P, "setDispatchType:", [](Object* d, SEL, unsigned long type) {
        d->label = type == 1 ? "concurrent" : "";
    });
    const char* C = "MTLCommandBuffer";
    method(C, "computeCommandEncoder",
           [](CommandBuffer* c, SEL) { return new_encoder(c, "MTLComputeCommandEncoder", false); });
    method(C, "computeCommandEncoderWithDispatchType:", [](CommandBuffer* c, SEL, unsigned long type) {
        return new_encoder(c, "MTLComputeCommandEncoder", type == 1);
    });
    method(C, "computeCommandEncoderWithDescriptor:", [](CommandBuffer* c, SEL, Object* d) {
        return new_encoder(c, "MTLComputeCommandEncoder", d->label == "concurrent");
    });
    method(C, "blitCommandEncoder",
           [](CommandBuffer* c, SEL) { return new_encoder(c, "MTLBlitCommandEncoder", false); });
}

}  // namespace metalsim::objc
