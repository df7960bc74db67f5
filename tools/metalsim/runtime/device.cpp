#include "device.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "config.hpp"
#include "counters.hpp"
#include "diagnostics.hpp"
#include "fibers.hpp"
#include "shadow.hpp"

namespace metalsim {

std::recursive_mutex& device_mutex() {
    static auto* mutex = new std::recursive_mutex;
    return *mutex;
}

namespace {

// Blocks for setBytes, which would otherwise use up address space: 4 KiB each, recycled.
std::vector<Buffer*> free_constant_blocks;

Buffer* take_constant_block(const void* bytes, size_t length, unsigned index) {
    Buffer* b;
    if (length <= arena::page && !free_constant_blocks.empty()) {
        b = free_constant_blocks.back();
        free_constant_blocks.pop_back();
        b->length = length;
    } else {
        b = arena::allocate(std::max<size_t>(length, arena::page), {.name = "setBytes", .read_only = true});
        b->length = length;
    }
    b->name = "setBytes(" + std::to_string(index) + ")";
    memcpy(b->base, bytes, length);
    return b;
}

// Places of threadgroup memory in the running dispatch.
struct ThreadgroupMemory {
    struct Variable {
        uint32_t offset, size;
    };
    std::vector<Variable> variables;
    uint32_t bytes = 0;  // as Metal counts them, without red zones

    void clear() {
        variables.clear();
        bytes = 0;
        shadow::group.memory_used = 0;
    }
    uint32_t reserve(uint32_t size) {
        uint32_t offset = (shadow::group.memory_used + 15) & ~15u;
        bytes = ((bytes + 15) & ~15u) + size;
        shadow::group.memory_used = offset + size + shadow::variable_gap;
        variables.push_back({offset, size});
        mark(variables.back());
        return offset;
    }
    static char* address(uint32_t offset) {
        return reinterpret_cast<char*>(arena::base + arena::threadgroup_offset + offset);
    }
    static void mark(const Variable& v) {
        if (!config().checks) return;
        memset(address(v.offset), 0xFF, v.size);
        shadow::mark_variable(v.offset, v.size);
    }
    void start_group() {
        if (!config().checks) return;
        shadow::mark_threadgroup_memory_unusable(shadow::group.memory_used);
        for (const Variable& v : variables) mark(v);
    }
};
ThreadgroupMemory threadgroup_memory;

}  // namespace

void* threadgroup_argument(unsigned index) {
    return ThreadgroupMemory::address(current_arguments->threadgroup_offset[index]);
}

void* ThreadgroupSlot::address(const char* variable) {
    if (dispatch != ordering::dispatch_serial()) {
        dispatch = ordering::dispatch_serial();
        name = variable;
        offset = threadgroup_memory.reserve(size);
        if (threadgroup_memory.bytes > config().max_threadgroup_memory)
            report("threadgroup-memory", std::to_string(threadgroup_memory.bytes) +
                                             " bytes of threadgroup memory, the limit is " +
                                             std::to_string(config().max_threadgroup_memory));
    }
    return ThreadgroupMemory::address(offset);
}

Encoder::Encoder(bool concurrent, const PassSet& after) {
    arena::initialise();
    pass_ = ordering::begin_pass(concurrent, after);
    counters::totals().encoders++;
}

Encoder::~Encoder() {
    for (Buffer* b : constants_) {
        shadow::forget(b->arena_offset, b->length);
        if (b->mapped == arena::page)
            free_constant_blocks.push_back(b);
        else
            arena::release(b);
    }
}

void Encoder::set_buffer(Buffer* b, uint64_t offset, unsigned index) {
    bound_[index] = b;
    arguments_.buffers[index] = b ? Binding{b->base + offset, b->length - offset, true} : Binding{};
}

void Encoder::set_offset(uint64_t offset, unsigned index) { set_buffer(bound_[index], offset, index); }

void Encoder::set_bytes(const void* bytes, size_t length, unsigned index) {
    Buffer* b = take_constant_block(bytes, length, index);
    constants_.push_back(b);
    counters::totals().constant_bytes += length;
    set_buffer(b, 0, index);
}

void Encoder::barrier() {
    counters::totals().barriers++;
    ordering::barrier();
}

void Encoder::barrier(const std::vector<Buffer*>& buffers) {
    counters::totals().barriers++;
    for (Buffer* b : buffers) ordering::barrier(*b);
}

bool Encoder::dispatch_threads(Uint3 threads, Uint3 group) {
    auto up = [](uint32_t n, uint32_t by) { return by ? (n + by - 1) / by : 0; };
    return dispatch(threads, group, {up(threads.x, group.x), up(threads.y, group.y), up(threads.z, group.z)},
                    true);
}

bool Encoder::dispatch_threadgroups(Uint3 groups, Uint3 group) {
    return dispatch({groups.x * group.x, groups.y * group.y, groups.z * group.z}, group, groups, false);
}

bool Encoder::dispatch_indirect(Buffer& buffer, uint64_t offset, Uint3 group) {
    uint32_t n[3] = {};
    if (offset % 4 || offset + sizeof n > buffer.length) {
        report("out-of-bounds", "indirect dispatch arguments at offset " + std::to_string(offset) + " of " +
                                    buffer.name + " (length " + std::to_string(buffer.length) + ")");
        return false;
    }
    memcpy(n, buffer.base + offset, sizeof n);
    return dispatch_threadgroups({n[0], n[1], n[2]}, group);
}

void Encoder::mark_bound_buffers() {
    uint64_t serial = ordering::dispatch_serial();
    for (unsigned i = 0; i < max_bindings; i++) {
        Buffer* b = bound_[i];
        if (!b) continue;
        uint64_t offset = uint64_t(arguments_.buffers[i].pointer - b->base);
        b->lowest_offset = b->bound_dispatch == serial ? std::min(b->lowest_offset, offset) : offset;
        b->bound_dispatch = serial;
    }
    for (Buffer* b : used_) {
        b->bound_dispatch = serial;
        b->lowest_offset = 0;
    }
}

bool Encoder::arguments_are_valid(Uint3 group, Uint3 groups) {
    const KernelInfo& kernel = *pipeline_->kernel;
    for (uint32_t i = 0; i < kernel.parameter_count; i++) {
        const ParameterInfo& p = kernel.parameters[i];
        const std::string index = std::to_string(p.index);
        if (p.kind == ParameterKind::threadgroup_memory) {
            if (!arguments_.threadgroup_length[p.index])
                report("missing-argument", "threadgroup(" + index + ") has no length");
            continue;
        }
        if (p.kind == ParameterKind::builtin) continue;
        const Binding& b = arguments_.buffers[p.index];
        if (!b.bound) {
            if (p.kind == ParameterKind::buffer)
                report("missing-argument", "buffer(" + index + ") is not bound");
            if (!p.is_reference)
                arguments_.buffers[p.index].pointer =
                    reinterpret_cast<char*>(arena::base + arena::unbound_offset + arena::unbound_size / 2);
            continue;
        }
        if (p.is_reference && b.length < p.element_size)
            report("short-argument", "buffer(" + index + ") has " + std::to_string(b.length) +
                                         " bytes, the kernel reads " + std::to_string(p.element_size));
        if (reinterpret_cast<uintptr_t>(b.pointer) % p.alignment)
            report("misaligned", "buffer(" + index + ") is bound at an offset that is not a multiple of " +
                                     std::to_string(p.alignment));
        if (bound_[p.index] && !bound_[p.index]->live)
            report("use-after-free",
                   "buffer(" + index + ") is bound to " + bound_[p.index]->name + ", which was released");
    }
    uint32_t limit = config().max_threads(kernel.name, pipeline_->max_threads);
    if (group.count() > limit) {
        // A Mac drops such a dispatch without an error.
        report("threads-per-group", std::to_string(group.count()) +
                                        " threads in a threadgroup, the pipeline's limit is " +
                                        std::to_string(limit));
        return false;
    }
    if (!group.count() || !groups.count()) {
        report("empty-grid", "the dispatch has no threads");
        return false;
    }
    return true;
}

bool Encoder::dispatch(Uint3 threads, Uint3 group, Uint3 groups, bool trim_edges) {
    ordering::begin_dispatch();
    const KernelInfo& kernel = *pipeline_->kernel;
    set_report_context(kernel.name);
    counters::begin_dispatch(kernel.name, groups, group);
    threadgroup_memory.clear();
    mark_bound_buffers();
    bool completed = arguments_are_valid(group, groups);
    if (completed) {
        for (unsigned i = 0; i < max_bindings; i++)
            if (uint32_t length = arguments_.threadgroup_length[i])
                arguments_.threadgroup_offset[i] = threadgroup_memory.reserve(length);
        apply_constants(*pipeline_);
        completed = fibers::run({&kernel, &arguments_, threads, group, groups, trim_edges}, config().seed,
                                [] { threadgroup_memory.start_group(); });
    }
    counters::end_dispatch();
    set_report_context("");
    return completed;
}

void Encoder::copy(Buffer& from, uint64_t from_offset, Buffer& to, uint64_t to_offset, uint64_t length) {
    ordering::begin_dispatch();
    counters::begin_dispatch("copy", {}, {});
    set_report_context("copy");
    shadow::command_access(from, from_offset, length, shadow::Access::read);
    shadow::command_access(to, to_offset, length, shadow::Access::write);
    memmove(to.base + to_offset, from.base + from_offset, length);
    set_report_context("");
    counters::end_dispatch();
}

void Encoder::fill(Buffer& b, uint64_t offset, uint64_t length, uint8_t value) {
    ordering::begin_dispatch();
    counters::begin_dispatch("fill", {}, {});
    set_report_context("fill");
    shadow::command_access(b, offset, length, shadow::Access::write);
    memset(b.base + offset, value, length);
    set_report_context("");
    counters::end_dispatch();
}

}  // namespace metalsim
