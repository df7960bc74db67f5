#include "fibers.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "diagnostics.hpp"
#include "ordering.hpp"
#include "shadow.hpp"

#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif

namespace metalsim {

__thread Thread* current_thread;
__thread const Launch* current_launch;
__thread const Arguments* current_arguments;

struct Stack {
    char* memory;
};

namespace fibers {

// Saves the callee-saved registers and the stack pointer, and continues on another stack.
extern "C" void metalsim_switch(void** save, void* to);
asm(R"(.text
.globl metalsim_switch
.hidden metalsim_switch
.type metalsim_switch,@function
metalsim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size metalsim_switch,.-metalsim_switch)");

namespace {

constexpr size_t stack_size = 256 << 10, guard_size = 4096;

enum State : uint8_t { fresh, ready, waiting, finished };
enum Wait : uint8_t { nothing, simd_collective, quad_collective, group_barrier, simd_barrier };

struct Scheduler {
    std::vector<Thread> threads;
    std::vector<Simdgroup> simdgroups;
    std::vector<Stack*> free_stacks;
    std::vector<uint32_t> queue;  // runnable threads from `head` on
    size_t head = 0;
    uint32_t live = 0, at_barrier = 0;
    void* main_stack_pointer = nullptr;
    const KernelInfo* kernel = nullptr;
    const Arguments* arguments = nullptr;
    bool shuffle = false, abandoned = false;
    std::minstd_rand random;
};
Scheduler* scheduler;

void fiber_main();

Stack* take_stack() {
    auto& free = scheduler->free_stacks;
    if (!free.empty()) {
        Stack* s = free.back();
        free.pop_back();
        return s;
    }
    void* memory = mmap(nullptr, stack_size + guard_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard_size, PROT_NONE)) abort();
    return new Stack{static_cast<char*>(memory) + guard_size};
}

// A stack whose first switch enters fiber_main.
void* prepare(Stack* s) {
    void** sp = reinterpret_cast<void**>(s->memory + stack_size);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}

Thread* next_thread() {
    Scheduler& s = *scheduler;
    if (s.head >= s.queue.size()) return nullptr;
    if (s.shuffle) std::swap(s.queue[s.head], s.queue[s.head + s.random() % (s.queue.size() - s.head)]);
    uint32_t index = s.queue[s.head++];
    if (s.head > 4096 && s.head * 2 > s.queue.size()) {
        s.queue.erase(s.queue.begin(), s.queue.begin() + long(s.head));
        s.head = 0;
    }
    return &s.threads[index];
}

void make_ready(Thread* t) {
    t->state = t->stack ? ready : fresh;
    scheduler->queue.push_back(t->index);
}

void switch_to(void** save, Thread* next) {
    if (!next) {
        metalsim_switch(save, scheduler->main_stack_pointer);
        return;
    }
    current_thread = next;
    if (!next->stack) {
        next->stack = take_stack();
        next->stack_pointer = prepare(next->stack);
    }
    metalsim_switch(save, next->stack_pointer);
}

void block(Thread* t) {
    t->state = waiting;
    switch_to(&t->stack_pointer, next_thread());
}

bool same_site(const Site& a, const Site& b) {
    return a.line == b.line && a.column == b.column && a.operation == b.operation &&
           (a.file == b.file || !strcmp(a.file, b.file));
}

std::string describe(const Site& s) {
    const char* name = strrchr(s.file, '/');
    return std::string(name ? name + 1 : s.file) + ":" + std::to_string(s.line) + ":" +
           std::to_string(s.column);
}

Thread* first_lane(const Simdgroup& g, uint32_t mask) { return g.lanes[__builtin_ctz(mask)]; }

template <class Visit>
void each_lane(const Simdgroup& g, uint32_t mask, Visit visit) {
    for (; mask; mask &= mask - 1) visit(g.lanes[__builtin_ctz(mask)]);
}

bool at_one_site(const Simdgroup& g, uint32_t mask) {
    const Site& site = first_lane(g, mask)->site;
    bool same = true;
    each_lane(g, mask, [&](Thread* t) { same = same && same_site(t->site, site); });
    return same;
}

// Completes the collective or barrier at which the lanes in `mask` wait.
void complete(Simdgroup& g, Thread* self, uint32_t mask) {
    Thread* any = first_lane(g, mask);
    if (any->wait == quad_collective)
        g.quad_arrived &= ~mask;
    else
        g.arrived &= ~mask;
    if (any->wait == simd_barrier) {
        if (any->barrier_flags & 2) {
            if ((++g.epoch_threadgroup & 0x1FF) == 0) shadow::settle_threadgroup_memory();
        }
        if (any->barrier_flags & 1) g.epoch_device++;
    } else if (any->combine) {
        // Reports of the operation belong to a lane that takes part, not to a thread that just returned.
        Thread* running = current_thread;
        current_thread = any;
        any->combine(g.lanes, mask);
        current_thread = running;
    }
    each_lane(g, mask, [&](Thread* t) {
        t->wait = nothing;
        if (t != self) make_ready(t);
    });
}

void complete_if_ready(Simdgroup& g) {
    if (g.arrived && g.arrived == g.live && at_one_site(g, g.arrived)) complete(g, nullptr, g.arrived);
    for (uint32_t quad = 0xF; quad; quad <<= 4) {
        uint32_t here = g.quad_arrived & quad;
        if (here && here == (g.live & quad) && at_one_site(g, here)) complete(g, nullptr, here);
    }
}

void wait_in_simdgroup(Thread* t, Wait wait) {
    Simdgroup& g = *t->simdgroup;
    t->wait = wait;
    g.arrived |= 1u << t->lane;
    if (g.arrived == g.live && at_one_site(g, g.arrived))
        complete(g, t, g.arrived);
    else
        block(t);
}

void release_barrier(Thread* self, unsigned flags) {
    Scheduler& s = *scheduler;
    if (flags & 2) {
        if ((++shadow::group.epoch_threadgroup & 0x3FF) == 0) shadow::settle_threadgroup_memory();
    }
    if (flags & 1) {
        if ((++shadow::group.epoch_device & 0x3FF) == 0) shadow::settle_device_memory_of_threadgroup();
    }
    s.at_barrier = 0;
    for (Thread& t : s.threads)
        if (t.wait == group_barrier) {
            t.wait = nothing;
            if (&t != self) make_ready(&t);
        }
}

void thread_finished(Thread* t) {
    Scheduler& s = *scheduler;
    t->state = finished;
    s.live--;
    t->simdgroup->live &= ~(1u << t->lane);
    if (t->simdgroup->live) complete_if_ready(*t->simdgroup);
    if (s.live && s.at_barrier == s.live) {
        Thread* waiter = nullptr;
        for (Thread& o : s.threads)
            if (o.wait == group_barrier) waiter = &o;
        report("barrier-divergence",
               "threadgroup_barrier at " + describe(waiter->site) + ": " +
                   std::to_string(s.threads.size() - s.live) + " thread(s) returned without reaching it",
               {nullptr, describe(waiter->site)});
        release_barrier(nullptr, waiter->barrier_flags);
    }
}

void fiber_main() {
    Thread* t = current_thread;
    for (;;) {
        scheduler->kernel->entry(*scheduler->arguments, *t);
        t = current_thread;
        Stack* s = t->stack;
        t->stack = nullptr;
        thread_finished(t);
        Thread* next = next_thread();
        if (next && next->state == fresh) {  // continue on this stack without a switch
            next->stack = s;
            current_thread = next;
            t = next;
            continue;
        }
        scheduler->free_stacks.push_back(s);
        void* unused;
        switch_to(&unused, next);
    }
}

// Threads wait but none can run: control flow diverged around a collective. Completes the collective that
// stands first in the source for the lanes that reached it, and reports; false if there is none.
bool resolve_divergence() {
    for (Simdgroup& g : scheduler->simdgroups) {
        uint32_t candidates = g.arrived ? g.arrived : g.quad_arrived;
        if (!candidates) continue;
        Thread* earliest = first_lane(g, candidates);
        each_lane(g, candidates, [&](Thread* t) {
            if (std::pair(t->site.line, t->site.column) <
                std::pair(earliest->site.line, earliest->site.column))
                earliest = t;
        });
        uint32_t group = g.live;
        if (earliest->wait == quad_collective) {
            uint32_t quad = 0xFu << (earliest->lane & ~3u);
            group &= quad;
            candidates &= quad;
        }
        uint32_t mask = 0;
        each_lane(g, candidates, [&](Thread* t) {
            if (same_site(t->site, earliest->site)) mask |= 1u << t->lane;
        });
        current_thread = earliest;
        report("simd-divergence",
               "only " + std::to_string(__builtin_popcount(mask)) + " of " +
                   std::to_string(__builtin_popcount(group)) + " live lanes reached the operation at " +
                   describe(earliest->site),
               {nullptr, describe(earliest->site)});
        complete(g, nullptr, mask);
        return true;
    }
    report("deadlock", "no thread can make progress");
    return false;
}

void place_threads(const Grid& grid, Uint3 at, Uint3 group) {
    Scheduler& s = *scheduler;
    uint32_t count = uint32_t(group.count()), simdgroups = (count + simd_width - 1) / simd_width;
    s.threads.assign(count, {});
    s.simdgroups.assign(simdgroups, {});
    s.queue.resize(count);
    std::iota(s.queue.begin(), s.queue.end(), 0u);
    s.head = 0;
    s.live = count;
    s.at_barrier = 0;
    for (uint32_t i = 0; i < simdgroups; i++)
        s.simdgroups[i].live = (i + 1) * simd_width <= count ? ~0u : (1u << (count % simd_width)) - 1;
    for (uint32_t i = 0; i < count; i++) {
        Thread& t = s.threads[i];
        Uint3 p{i % group.x, i / group.x % group.y, i / group.x / group.y};
        t.position_in_threadgroup = p;
        t.threadgroup_position = at;
        t.position_in_grid = {at.x * grid.group.x + p.x, at.y * grid.group.y + p.y,
                              at.z * grid.group.z + p.z};
        t.index = i;
        t.lane = i % simd_width;
        t.simdgroup_index = i / simd_width;
        t.simdgroup = &s.simdgroups[i / simd_width];
        t.simdgroup->lanes[t.lane] = &t;
        t.state = fresh;
    }
}

bool run_threadgroup() {
    Scheduler& s = *scheduler;
    shadow::group.running = true;
    for (;;) {
        if (Thread* next = next_thread()) switch_to(&s.main_stack_pointer, next);
        shadow::group.running = false;
        current_thread = nullptr;
        if (s.abandoned) {
            for (Thread& t : s.threads)
                if (t.stack) s.free_stacks.push_back(t.stack);
            return false;
        }
        if (!s.live) return true;
        if (!resolve_divergence()) return false;
        shadow::group.running = true;
    }
}

}  // namespace

bool run(const Grid& grid, uint64_t seed, GroupStart start) {
    if (!scheduler) scheduler = new Scheduler;
    Scheduler& s = *scheduler;
    s.kernel = grid.kernel;
    s.arguments = grid.arguments;
    s.abandoned = false;
    s.shuffle = seed != 0;
    s.random.seed(uint32_t(seed * 7919 + ordering::current_dispatch() + 1));
    std::vector<uint32_t> order(grid.groups.count());
    std::iota(order.begin(), order.end(), 0u);
    if (s.shuffle) std::shuffle(order.begin(), order.end(), s.random);
    Launch launch{grid.threads, grid.group, grid.groups, grid.group};
    current_launch = &launch;
    current_arguments = grid.arguments;
    bool completed = true;
    for (uint32_t index : order) {
        Uint3 at{index % grid.groups.x, index / grid.groups.x % grid.groups.y,
                 index / grid.groups.x / grid.groups.y};
        Uint3 size = grid.group;
        if (grid.trim_edges) {
            size.x = std::min(size.x, grid.threads.x - at.x * size.x);
            size.y = std::min(size.y, grid.threads.y - at.y * size.y);
            size.z = std::min(size.z, grid.threads.z - at.z * size.z);
        }
        launch.threads_per_threadgroup = size;
        shadow::group.index = index;
        shadow::group.epoch_threadgroup = shadow::group.epoch_device = 0;
        ordering::begin_threadgroup();
        start();
        place_threads(grid, at, size);
        completed = run_threadgroup();
        if (!completed) break;
    }
    current_launch = nullptr;
    current_arguments = nullptr;
    return completed;
}

void abandon_dispatch() {
    if (!shadow::group.running) abort();
    scheduler->abandoned = true;
    void* unused;
    metalsim_switch(&unused, scheduler->main_stack_pointer);
    abort();
}

}  // namespace fibers

// ---- what kernels call --------------------------------------------------------------------------------

void simdgroup_collective(Thread* t) { fibers::wait_in_simdgroup(t, fibers::simd_collective); }

void quadgroup_collective(Thread* t) {
    Simdgroup& g = *t->simdgroup;
    t->wait = fibers::quad_collective;
    g.quad_arrived |= 1u << t->lane;
    uint32_t quad = 0xFu << (t->lane & ~3u), here = g.quad_arrived & quad;
    if (here == (g.live & quad) && fibers::at_one_site(g, here))
        fibers::complete(g, t, here);
    else
        fibers::block(t);
}

void simdgroup_barrier_wait(unsigned flags, Site site) {
    Thread* t = current_thread;
    t->site = site;
    t->combine = nullptr;
    t->barrier_flags = flags;
    fibers::wait_in_simdgroup(t, fibers::simd_barrier);
}

void threadgroup_barrier_wait(unsigned flags, Site site) {
    fibers::Scheduler& s = *fibers::scheduler;
    Thread* t = current_thread;
    t->wait = fibers::group_barrier;
    t->site = site;
    t->barrier_flags = flags;
    if (++s.at_barrier < s.live) return fibers::block(t);
    if (s.live != s.threads.size())
        report("barrier-divergence",
               "threadgroup_barrier at " + fibers::describe(site) + " reached after " +
                   std::to_string(s.threads.size() - s.live) + " thread(s) returned",
               {nullptr, fibers::describe(site)});
    for (const Thread& o : s.threads)
        if (o.wait == fibers::group_barrier && !fibers::same_site(o.site, site)) {
            report("barrier-divergence",
                   "threads wait at different barriers: " + fibers::describe(site) + " and " +
                       fibers::describe(o.site),
                   {nullptr, fibers::describe(site)});
            break;
        }
    fibers::release_barrier(t, flags);
}

void report_from_kernel(const char* kind, const char* message, void* pc) {
    std::string where = pc || !current_thread ? "" : fibers::describe(current_thread->site);
    report(kind, message, {pc, where});
}

void misaligned_vector(const void*, unsigned alignment, void* pc) {
    report("misaligned", "vector access at an address that is not a multiple of " + std::to_string(alignment),
           {pc});
}

void atomic_access(const volatile void* address, unsigned size, AtomicKind kind, void* pc) {
    auto a = reinterpret_cast<uintptr_t>(address);
    if (a % size)
        report("misaligned", "atomic access at an address that is not a multiple of its size", {pc});
    shadow::access(a, size,
                   kind == AtomicKind::load    ? shadow::Access::atomic_load
                   : kind == AtomicKind::store ? shadow::Access::atomic_store
                                               : shadow::Access::atomic_modify,
                   pc);
    Thread* t = current_thread;
    if (kind != AtomicKind::read_modify_write || !t) return;
    t->last_counter = address;
    if (t->fenced)
        ordering::release_at(a,
                             {shadow::group.index & 0x7FFFF, shadow::group.epoch_device & 0x3FF, t->index});
}

void ordered_counter(const volatile void* address) {
    const Thread* t = current_thread;
    auto a = reinterpret_cast<uintptr_t>(address);
    ordering::Release own{shadow::group.index & 0x7FFFF, shadow::group.epoch_device & 0x3FF, t->index};
    ordering::acquire_at(a, own);
    ordering::release_at(a, own);
}

void thread_fence(unsigned flags) {
    Thread* t = current_thread;
    if (!(flags & 1)) return;
    t->fenced = true;
    if (t->last_counter)
        ordering::acquire_at(reinterpret_cast<uintptr_t>(t->last_counter),
                             {shadow::group.index & 0x7FFFF, shadow::group.epoch_device & 0x3FF, t->index});
}

}  // namespace metalsim
