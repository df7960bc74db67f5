// Shadow memory: for each byte of the arena the last write and the last reads, as 64-bit stamps.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arena.hpp"

namespace metalsim::shadow {

struct Cell {
    uint64_t write, read;
};
constexpr uintptr_t base = 0x300000000000;

enum class Access { read, write, atomic_load, atomic_store, atomic_modify };

// Checks an access of kernel code against bounds and earlier accesses, and records it.
// Called for every instrumented load and store; cheap outside the arena.
void access(uintptr_t address, unsigned size, Access kind, void* pc);
// The same for a copy or fill command, which has no threads.
void command_access(Buffer& buffer, uint64_t offset, uint64_t length, Access kind);

// The bytes count as written by nobody.
void forget(uint64_t arena_offset, uint64_t length);
// Everything so far is ordered before what follows; what was written stays initialised.
void settle_all();

// Threadgroup memory: variables are placed with 64-byte red zones, uninitialised for each threadgroup.
constexpr uint32_t variable_gap = 64;
void mark_variable(uint32_t offset, uint32_t size);
void mark_threadgroup_memory_unusable(uint32_t used);

// Called by the scheduler when the 10-bit barrier counts of the running threadgroup wrap.
void settle_threadgroup_memory();
void settle_device_memory_of_threadgroup();

// The threadgroup that runs now and how much threadgroup memory it has.
struct Group {
    uint64_t index = 0;
    uint32_t epoch_threadgroup = 0, epoch_device = 0;  // barriers passed, per kind of memory
    uint32_t memory_used = 0;
    bool running = false;  // kernel code is executing
};
extern Group group;

}  // namespace metalsim::shadow
