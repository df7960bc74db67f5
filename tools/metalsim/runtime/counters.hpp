// Counts of what the simulated GPU did, and a log of dispatches on request.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_abi.hpp"

namespace metalsim::counters {

struct Traffic {
    uint64_t read = 0, written = 0;   // distinct bytes of buffers
    uint64_t loaded = 0, stored = 0;  // bytes of all accesses
};

struct Totals {
    uint64_t command_buffers = 0, encoders = 0, dispatches = 0, barriers = 0, stages = 0, threads = 0,
             constant_bytes = 0;
    Traffic traffic;
};

struct DispatchEntry {
    std::string kernel;
    Uint3 groups, threads;
    uint64_t stage;
    Traffic traffic;
};

// All of these are called with the device locked.
Totals& totals();
void reset();
Traffic& current_traffic();
void begin_dispatch(const char* kernel, Uint3 groups, Uint3 threads);
void end_dispatch();
void enable_log(bool enabled);
const std::vector<DispatchEntry>& log();

}  // namespace metalsim::counters
