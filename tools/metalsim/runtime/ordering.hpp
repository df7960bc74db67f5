// Which work is ordered before which: dispatches among each other, and threadgroups of one dispatch that
// meet at a counter.
//
// A pass is one command encoder as it runs. Dispatches of a concurrent pass are ordered only by barriers.
// Passes are ordered for buffers that Metal tracks; for untracked ones only through fences, events, or the
// host (it saw the earlier one complete before it committed the later one).
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "arena.hpp"

namespace metalsim {

// A set of passes by number, mostly "all up to n".
struct PassSet {
    uint64_t up_to = 0;
    std::set<uint64_t> more = {};

    bool contains(uint64_t pass) const { return pass <= up_to || more.count(pass); }
    void add(uint64_t pass) { more.insert(pass); }
    void merge(const PassSet& other);
};

namespace ordering {

// Dispatches are numbered from 1 within a generation; when the numbers run out the shadow is settled.
constexpr uint32_t last_dispatch = 4095;

// Starts a pass; returns its number. `after` = passes that fences, events and the host put before it.
uint64_t begin_pass(bool concurrent, const PassSet& after);
// Adds passes that a waitForFence in the running pass puts before it.
void extend_pass(const PassSet& after);
// Number of the dispatch that starts now, in the running pass.
uint32_t begin_dispatch();
uint32_t current_dispatch();
uint64_t dispatch_serial();  // since the library was loaded; never repeats

void barrier();
void barrier(Buffer& buffer);

// Whether the dispatch with this number was ordered before the current one, for accesses to `buffer`
// (nullptr = threadgroup memory).
bool ordered_before(uint32_t dispatch, const Buffer* buffer);

// Ordinal of the current group of dispatches that nothing orders among themselves.
uint64_t stage();

// ---- counters that order threadgroups ---------------------------------------------------------------

// The calling thread of `group` at device epoch `epoch` passes the counter: takes over what others
// released there and releases its own past.
struct Release {
    uint64_t group;
    uint32_t epoch, thread;
    bool operator<(const Release& o) const { return group < o.group; }
};
void release_at(uintptr_t counter, const Release& own);
void acquire_at(uintptr_t counter, const Release& own);
void begin_threadgroup();
// Whether an access of another threadgroup was released to the current one and acquired by it.
bool group_ordered(uint64_t group, uint32_t epoch, uint32_t thread, uint32_t own_epoch, uint32_t own_thread);

}  // namespace ordering
}  // namespace metalsim
