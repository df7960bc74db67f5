// The C interface (include/metalsim.h) on top of the runtime.
#include "metalsim.h"

#include <cstring>
#include <string>

#include "arena.hpp"
#include "config.hpp"
#include "counters.hpp"
#include "device.hpp"
#include "diagnostics.hpp"
#include "faults.hpp"
#include "library.hpp"

using namespace metalsim;

struct metalsim_encoder {
    explicit metalsim_encoder(bool concurrent) : encoder(concurrent) {}
    Encoder encoder;
    std::vector<std::unique_ptr<Pipeline>> pipelines;
    std::vector<ConstantValue> constants;
    Library* library = nullptr;
    const KernelInfo* kernel = nullptr;
};

namespace {

thread_local std::string last_error;

Library* unwrap(metalsim_library* l) { return reinterpret_cast<Library*>(l); }
const Library* unwrap(const metalsim_library* l) { return reinterpret_cast<const Library*>(l); }
Buffer* unwrap(metalsim_buffer* b) { return reinterpret_cast<Buffer*>(b); }
using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

extern "C" {

void metalsim_set_seed(uint64_t seed) { config().seed = seed; }
void metalsim_set_checks(int enabled) { config().checks = enabled != 0; }
void metalsim_set_max_threads(const char* kernel, uint32_t limit) { config().set_max_threads(kernel, limit); }
void metalsim_set_working_set(uint64_t bytes) { config().working_set = bytes; }
void metalsim_set_max_buffer(uint64_t bytes) { config().max_buffer = bytes; }
void metalsim_set_macos(int major, int minor) {
    config().macos_major = major;
    config().macos_minor = minor;
}
void metalsim_set_family(const char* architecture, int family) { config().set_family(architecture, family); }
void metalsim_set_wait_timeout(double seconds) { config().wait_timeout = seconds; }

size_t metalsim_diagnostic_count() { return diagnostic_count(); }

int metalsim_diagnostic_at(size_t index, metalsim_diagnostic* out) {
    static thread_local std::vector<Diagnostic> copy;
    copy = diagnostics();
    if (index >= copy.size()) return 0;
    const Diagnostic& d = copy[index];
    *out = {d.kind.c_str(), d.kernel.c_str(), d.message.c_str(), d.where.c_str(), d.count};
    return 1;
}

void metalsim_diagnostics_clear() { clear_diagnostics(); }

void metalsim_counters_get(metalsim_counters* out) {
    Lock lock(device_mutex());
    const counters::Totals& t = counters::totals();
    *out = {t.command_buffers, t.encoders,       t.dispatches,    t.barriers,
            t.stages,          t.threads,        t.traffic.read,  t.traffic.written,
            t.traffic.loaded,  t.traffic.stored, t.constant_bytes};
}

void metalsim_counters_reset() {
    Lock lock(device_mutex());
    counters::reset();
}

void metalsim_dispatch_log(int enabled) {
    Lock lock(device_mutex());
    counters::enable_log(enabled != 0);
}

size_t metalsim_dispatch_log_count() {
    Lock lock(device_mutex());
    return counters::log().size();
}

int metalsim_dispatch_log_at(size_t index, metalsim_dispatch* out) {
    Lock lock(device_mutex());
    if (index >= counters::log().size()) return 0;
    const counters::DispatchEntry& e = counters::log()[index];
    *out = {e.kernel.c_str(),
            {e.groups.x, e.groups.y, e.groups.z},
            {e.threads.x, e.threads.y, e.threads.z},
            e.stage,
            e.traffic.read,
            e.traffic.written,
            e.traffic.loaded,
            e.traffic.stored};
    return 1;
}

uint64_t metalsim_allocated_bytes() {
    Lock lock(device_mutex());
    return arena::allocated_bytes();
}

int metalsim_fault(const char* kind, uint32_t nth, int code, uint32_t repeat) {
    return faults::arm(kind, nth, code, repeat);
}
void metalsim_faults_clear() { faults::clear(); }

metalsim_library* metalsim_library_open(const char* path) {
    return reinterpret_cast<metalsim_library*>(open_library(path, last_error));
}
const char* metalsim_last_error() { return last_error.c_str(); }
size_t metalsim_library_kernel_count(const metalsim_library* l) { return unwrap(l)->kernels.size(); }
const char* metalsim_library_kernel_name(const metalsim_library* l, size_t index) {
    return index < unwrap(l)->kernels.size() ? unwrap(l)->kernels[index].name : nullptr;
}
uint32_t metalsim_kernel_threadgroup_memory(const metalsim_library* l, const char* kernel) {
    const KernelInfo* k = unwrap(l)->find(kernel);
    return k ? static_threadgroup_memory(*k) : 0;
}
uint32_t metalsim_kernel_max_threads(const metalsim_library* l, const char* kernel) {
    const KernelInfo* k = unwrap(l)->find(kernel);
    return k ? config().max_threads(k->name, k->max_threads) : 0;
}

metalsim_buffer* metalsim_buffer_new(uint64_t length, const char* name, unsigned flags) {
    Lock lock(device_mutex());
    return reinterpret_cast<metalsim_buffer*>(
        arena::allocate(length, {.name = name,
                                 .tracked = !(flags & METALSIM_UNTRACKED),
                                 .track_initialisation = (flags & METALSIM_TRACK_INITIALISATION) != 0,
                                 .read_only = (flags & METALSIM_READ_ONLY) != 0}));
}
void* metalsim_buffer_contents(metalsim_buffer* b) { return unwrap(b)->base; }
void metalsim_buffer_free(metalsim_buffer* b) {
    Lock lock(device_mutex());
    arena::release(unwrap(b));
}

metalsim_encoder* metalsim_encoder_new(int concurrent) {
    // Held until the encoder ends: passes don't interleave.
    device_mutex().lock();
    return new metalsim_encoder(concurrent != 0);
}
void metalsim_encoder_end(metalsim_encoder* e) {
    delete e;
    device_mutex().unlock();
}
int metalsim_encoder_pipeline(metalsim_encoder* e, metalsim_library* l, const char* kernel) {
    const KernelInfo* k = unwrap(l)->find(kernel);
    if (!k) return 0;
    e->library = unwrap(l);
    e->kernel = k;
    e->constants.clear();
    return 1;
}
void metalsim_encoder_constant(metalsim_encoder* e, int index, const void* value, size_t size) {
    auto* bytes = static_cast<const char*>(value);
    e->constants.push_back({index, std::vector<char>(bytes, bytes + size)});
}
void metalsim_encoder_buffer(metalsim_encoder* e, metalsim_buffer* b, uint64_t offset, int index) {
    e->encoder.set_buffer(unwrap(b), offset, unsigned(index));
}
void metalsim_encoder_bytes(metalsim_encoder* e, const void* bytes, size_t length, int index) {
    e->encoder.set_bytes(bytes, length, unsigned(index));
}
void metalsim_encoder_threadgroup_memory(metalsim_encoder* e, uint32_t length, int index) {
    e->encoder.set_threadgroup_memory(length, unsigned(index));
}
void metalsim_encoder_barrier(metalsim_encoder* e) { e->encoder.barrier(); }
int metalsim_encoder_dispatch(metalsim_encoder* e, const uint32_t grid[3], const uint32_t group[3],
                              int grid_is_threads) {
    if (!e->kernel) return 0;
    e->pipelines.push_back(
        std::make_unique<Pipeline>(Pipeline{e->library, e->kernel, e->constants, e->kernel->max_threads}));
    e->encoder.set_pipeline(*e->pipelines.back());
    Uint3 g{grid[0], grid[1], grid[2]}, t{group[0], group[1], group[2]};
    return grid_is_threads ? e->encoder.dispatch_threads(g, t) : e->encoder.dispatch_threadgroups(g, t);
}
}
