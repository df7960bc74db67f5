#include "shadow.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <string>

#include "config.hpp"
#include "counters.hpp"
#include "diagnostics.hpp"
#include "fibers.hpp"
#include "ordering.hpp"

namespace metalsim::shadow {

Group group;

namespace {

Cell* const cells = reinterpret_cast<Cell*>(base);

// A stamp says who touched the byte:
//   groups 1 | shared 1 | dispatch 12 | threadgroup 19 | thread 10 | barrier epoch 10 | simdgroup epoch 9 |
//   atomic 1 | valid 1
// In a read stamp, `shared` means several unordered readers of one threadgroup (thread = all ones: of several
// simdgroups) and `groups` readers of several threadgroups (threadgroup, thread and epoch = all ones: of
// several dispatches).
constexpr uint64_t of_groups = 1ull << 63, shared = 1ull << 62, all_threads = 0x3FFull << 21, atomic_bit = 2,
                   valid = 1;
constexpr uint64_t of_dispatches = of_groups | 0x7FFFFull << 31 | all_threads | 0x3FFull << 11;
constexpr uint64_t settled = valid;   // dispatch 0: ordered before everything
constexpr uint64_t unusable = ~0ull;  // threadgroup memory outside a variable

uint32_t dispatch_of(uint64_t s) { return uint32_t(s >> 50 & 0xFFF); }
uint64_t group_of(uint64_t s) { return s >> 31 & 0x7FFFF; }
uint32_t thread_of(uint64_t s) { return uint32_t(s >> 21 & 0x3FF); }
uint32_t epoch_of(uint64_t s) { return uint32_t(s >> 11 & 0x3FF); }
uint32_t simd_epoch_of(uint64_t s) { return uint32_t(s >> 2 & 0x1FF); }
bool is_atomic(uint64_t s) { return s & atomic_bit; }
bool has_many_dispatches(uint64_t s) { return (s & of_dispatches) == of_dispatches; }
bool has_many_simdgroups(uint64_t s) { return (s & shared) && (s & all_threads) == all_threads; }

uint64_t stamp(uint64_t dispatch, uint64_t group_index, uint64_t thread, uint64_t epoch, uint64_t simd_epoch,
               bool is_atomic_access) {
    return (dispatch & 0xFFF) << 50 | (group_index & 0x7FFFF) << 31 | (thread & 0x3FF) << 21 |
           (epoch & 0x3FF) << 11 | (simd_epoch & 0x1FF) << 2 | (is_atomic_access ? atomic_bit : 0) | valid;
}

// Whether the access with stamp `p` was synchronised before the current one with stamp `c`.
bool ordered(uint64_t p, uint64_t c, const Buffer* buffer) {
    if (dispatch_of(p) != dispatch_of(c)) return ordering::ordered_before(dispatch_of(p), buffer);
    if (p & of_groups) return false;
    if (group_of(p) != group_of(c))
        return !(p & shared) &&
               ordering::group_ordered(group_of(p), epoch_of(p), thread_of(p), epoch_of(c), thread_of(c));
    if (epoch_of(p) != epoch_of(c)) return true;
    if (!(p & shared) && thread_of(p) == thread_of(c)) return true;
    if (has_many_simdgroups(p)) return false;
    return thread_of(p) / 32 == thread_of(c) / 32 && simd_epoch_of(p) != simd_epoch_of(c);
}

// The read stamp after one more read, which was found ordered after the last write.
uint64_t merge_read(uint64_t r, uint64_t now, const Buffer* buffer) {
    if (!r) return now;
    if (dispatch_of(r) != dispatch_of(now))
        return !buffer || ordering::ordered_before(dispatch_of(r), buffer) ? now : now | of_dispatches;
    if (r & of_groups) return r;
    if (group_of(r) != group_of(now)) return now | of_groups;
    if (epoch_of(r) != epoch_of(now)) return now;
    if (has_many_simdgroups(r)) return r;
    if (!(r & shared) && thread_of(r) == thread_of(now)) return now;
    if (thread_of(r) / 32 != thread_of(now) / 32) return now | shared | all_threads;
    return simd_epoch_of(r) != simd_epoch_of(now) ? now : now | shared;
}

__attribute__((noinline)) void report_race(const char* what, uint64_t p, uint64_t c, const Buffer* b,
                                           uint64_t offset, void* pc) {
    std::string place =
        std::string(what) + " on " + (b ? b->name : "threadgroup memory") + "+" + std::to_string(offset);
    if (dispatch_of(p) != dispatch_of(c) || has_many_dispatches(p)) {
        report("dispatch-hazard", place + ": no barrier, fence or event since an earlier dispatch touched it",
               {pc});
        return;
    }
    const char* kind = !b                                              ? "race-threadgroup"
                       : group_of(p) != group_of(c) || (p & of_groups) ? "race-across-groups"
                                                                       : "race-device";
    std::string other = p & of_groups
                            ? "several threadgroups"
                            : "threadgroup " + std::to_string(group_of(p)) +
                                  (has_many_simdgroups(p) ? "" : " thread " + std::to_string(thread_of(p)));
    report(kind, place + " with " + other, {pc});
}

__attribute__((noinline)) void abandon(const char* kind, const std::string& message, void* pc) {
    report(kind, message, {pc});
    fibers::abandon_dispatch();
}

bool is_atomic(Access kind) { return kind >= Access::atomic_load; }
bool loads(Access kind) { return kind != Access::write && kind != Access::atomic_store; }
bool stores(Access kind) { return kind != Access::read && kind != Access::atomic_load; }

std::string describe(Access kind, unsigned size) {
    const char* verb = is_atomic(kind) ? "atomic access" : kind == Access::read ? "read" : "write";
    return std::string(verb) + " of " + std::to_string(size) + " bytes";
}

void check_buffer(const Buffer* b, uint64_t offset, unsigned size, Access kind, void* pc) {
    if (!b) return abandon("out-of-bounds", describe(kind, size) + " outside any buffer", pc);
    if (!b->live)
        return abandon("use-after-free", describe(kind, size) + " of " + b->name + ", which was released",
                       pc);
    if (offset + size > b->length)
        return abandon("out-of-bounds",
                       describe(kind, size) + " at offset " + std::to_string(offset) + " of " + b->name +
                           " (length " + std::to_string(b->length) + ")",
                       pc);
    if (b->bound_dispatch != ordering::dispatch_serial())
        report("unbound-buffer",
               describe(kind, size) + " of " + b->name + ", which this dispatch neither binds nor uses",
               {pc});
    else if (offset < b->lowest_offset)
        report("below-binding",
               "offset " + std::to_string(offset) + " of " + b->name + " is below the bound offset", {pc});
    if (stores(kind) && b->read_only) report("write-constant", b->name, {pc});
}

// The part on shadow cells; returns how many bytes this dispatch touched for the first time. Neighbouring
// bytes mostly have equal stamps and are handled together.
struct Fresh {
    uint32_t read = 0, written = 0;
};
Fresh touch(Cell* c, unsigned size, Access kind, uint64_t now, const Buffer* b, uint64_t offset, void* pc) {
    Fresh fresh;
    // An atomic load is stamped like an atomic write: it may meet atomics, but no plain write.
    const bool atomic = is_atomic(kind);
    for (unsigned done = 0, run; done < size; done += run, c += run) {
        const uint64_t w = c->write, r = c->read;
        for (run = 1; done + run < size && c[run].write == w && c[run].read == r;) run++;
        if (w == unusable && !b)
            return abandon("out-of-bounds", describe(kind, size) + " outside a threadgroup variable", pc),
                   fresh;
        if (w) {
            if (!(atomic && is_atomic(w)) && !ordered(w, now, b))
                report_race(kind == Access::read ? "read after write" : "write after write", w, now, b,
                            offset + done, pc);
        } else if (loads(kind) && (!b || b->track_initialisation)) {
            report("uninitialised",
                   b ? "read of " + b->name + "+" + std::to_string(offset + done) + ", which nobody wrote"
                     : "read of threadgroup memory that nobody wrote",
                   {pc});
        }
        const bool first_read = !r || dispatch_of(r) != dispatch_of(now);
        const bool first_write = !w || dispatch_of(w) != dispatch_of(now);
        if (loads(kind) && first_read) fresh.read += run;
        if (kind == Access::read) {
            const uint64_t merged = merge_read(r, now, b);
            if (merged != r)
                for (unsigned i = 0; i < run; i++) c[i].read = merged;
            continue;
        }
        if (r && !(atomic && is_atomic(r)) && !ordered(r, now, b))
            report_race("write after read", r, now, b, offset + done, pc);
        if (stores(kind) && first_write) fresh.written += run;
        for (unsigned i = 0; i < run; i++) {
            c[i].write = now;
            if (atomic) c[i].read = now;
        }
    }
    return fresh;
}

// Whether the process has memory at an address outside of all buffers: constants of the kernel library, what
// the runtime gives to kernels.
bool is_mapped(uintptr_t address) {
    constexpr uintptr_t page = 4096;
    constexpr unsigned slot_bits = 13;  // the stacks of a threadgroup's threads, at equal distances
    static std::atomic<uintptr_t> known[1u << slot_bits];
    const uintptr_t number = address / page;
    std::atomic<uintptr_t>& slot = known[number * 0x9e3779b97f4a7c15u >> (64 - slot_bits)];
    if (slot.load(std::memory_order_relaxed) == number) return true;
    unsigned char resident;
    if (mincore(reinterpret_cast<void*>(number * page), page, &resident) != 0) return false;
    slot.store(number, std::memory_order_relaxed);
    return true;
}

}  // namespace

void access(uintptr_t address, unsigned size, Access kind, void* pc) {
    uint64_t offset = address - arena::base;
    Buffer* b = nullptr;
    if (__builtin_expect(offset >= arena::size, 0)) {
        if (!group.running) return;
        if (address < 65536) return abandon("null-buffer", "access through an unbound buffer argument", pc);
        b = arena::host_owner(address);
        if (!b && is_mapped(address)) return;
        // A pointer made from garbage: the access itself would end the process.
        if (!b) return abandon("out-of-bounds", describe(kind, size) + " outside any buffer", pc);
        offset = b->arena_offset + (address - reinterpret_cast<uintptr_t>(b->base));
    }
    if (!group.running || !config().checks.load(std::memory_order_relaxed)) return;
    const bool in_buffer = offset < arena::threadgroup_offset;
    uint64_t within = offset - arena::threadgroup_offset;
    if (in_buffer) {
        if (!b) b = arena::owner(offset);
        within = b ? offset - b->arena_offset : 0;
        if (!b && offset >= arena::unbound_offset)
            return abandon("null-buffer", describe(kind, size) + " through an unbound buffer argument", pc);
        check_buffer(b, within, size, kind, pc);
    } else if (within + size > group.memory_used) {
        return abandon("out-of-bounds", describe(kind, size) + " beyond the threadgroup memory", pc);
    }
    const Thread* t = current_thread;
    uint64_t now =
        stamp(ordering::current_dispatch(), group.index, t->index,
              in_buffer ? group.epoch_device : group.epoch_threadgroup,
              in_buffer ? t->simdgroup->epoch_device : t->simdgroup->epoch_threadgroup, is_atomic(kind));
    Fresh fresh = touch(cells + offset, size, kind, now, in_buffer ? b : nullptr, within, pc);
    if (in_buffer && !b->read_only) {
        counters::Traffic& traffic = counters::current_traffic();
        traffic.read += fresh.read;
        traffic.written += fresh.written;
        if (loads(kind)) traffic.loaded += size;
        if (stores(kind)) traffic.stored += size;
        b->written |= stores(kind) || is_atomic(kind);
    }
}

void command_access(Buffer& b, uint64_t offset, uint64_t length, Access kind) {
    if (!config().checks) return;
    uint64_t now = stamp(ordering::current_dispatch(), 0, 0, 0, 0, false);
    b.written |= kind == Access::write;
    for (uint64_t at = 0; at < length; at += 4096) {
        unsigned size = unsigned(std::min<uint64_t>(4096, length - at));
        Fresh fresh = touch(cells + b.arena_offset + offset + at, size, kind, now, &b, offset + at, nullptr);
        counters::Traffic& traffic = counters::current_traffic();
        traffic.read += fresh.read;
        traffic.written += fresh.written;
        (kind == Access::read ? traffic.loaded : traffic.stored) += size;
    }
}

void forget(uint64_t arena_offset, uint64_t length) {
    // Whole pages go back to the system; the rest of the range is cleared.
    if (length * sizeof(Cell) >= 65536)
        madvise(cells + arena_offset, length * sizeof(Cell), MADV_DONTNEED);
    else
        memset(static_cast<void*>(cells + arena_offset), 0, length * sizeof(Cell));
}

void settle_all() {
    for (Buffer* b : arena::live_buffers()) {
        if (!b->written) {  // weights: large, and nothing of their past matters
            forget(b->arena_offset, b->mapped);
            continue;
        }
        for (uint64_t i = 0; i < b->length; i++) {
            Cell& c = cells[b->arena_offset + i];
            // Reading an untouched cell maps the zero page; writing it would make it real.
            if (c.write) c.write = settled;
            if (c.read) c.read = 0;
        }
    }
}

void mark_variable(uint32_t offset, uint32_t size) {
    Cell* c = cells + arena::threadgroup_offset + offset;
    memset(static_cast<void*>(c), 0, size * sizeof(Cell));
    memset(static_cast<void*>(c + size), 0xFF, variable_gap * sizeof(Cell));
}

void mark_threadgroup_memory_unusable(uint32_t used) {
    memset(static_cast<void*>(cells + arena::threadgroup_offset), 0xFF, used * sizeof(Cell));
}

void settle_threadgroup_memory() {
    Cell* c = cells + arena::threadgroup_offset;
    for (uint32_t i = 0; i < group.memory_used; i++, c++) {
        if (c->write == unusable) continue;
        if (c->write) c->write = settled;
        c->read = 0;
    }
}

void settle_device_memory_of_threadgroup() {
    const uint32_t dispatch = ordering::current_dispatch();
    auto own = [&](uint64_t s) {
        return dispatch_of(s) == dispatch && group_of(s) == (group.index & 0x7FFFF) && !(s & of_groups);
    };
    for (Buffer* b : arena::live_buffers()) {
        if (b->bound_dispatch != ordering::dispatch_serial()) continue;
        for (uint64_t i = 0; i < b->length; i++) {
            Cell& c = cells[b->arena_offset + i];
            if (own(c.write)) c.write = settled;
            if (own(c.read)) c.read = 0;
        }
    }
}

}  // namespace metalsim::shadow
