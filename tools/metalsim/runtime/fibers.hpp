// Runs the threads of one threadgroup at a time as fibers on the calling OS thread.
//
// A thread that never waits runs as a plain loop iteration on a shared stack; only a thread that waits at a
// barrier or a collective keeps a stack of its own. One dispatch runs at a time in the whole process.
#pragma once
#include <cstdint>

#include "kernel_abi.hpp"

namespace metalsim::fibers {

struct Grid {
    const KernelInfo* kernel;
    const Arguments* arguments;
    Uint3 threads;    // of the whole grid
    Uint3 group;      // threads in a threadgroup
    Uint3 groups;     // threadgroups in the grid
    bool trim_edges;  // dispatchThreads: groups at the edge are smaller
};

// Called for each threadgroup before its threads start.
using GroupStart = void (*)();

// Runs the whole grid; false if the dispatch was abandoned (a fault was reported).
// Seed 0 runs groups and threads in order, any other seed shuffles both.
bool run(const Grid& grid, uint64_t seed, GroupStart start);

// Ends the dispatch from inside kernel code.
[[noreturn]] void abandon_dispatch();

}  // namespace metalsim::fibers
