#include "counters.hpp"

#include "ordering.hpp"

namespace metalsim::counters {

namespace {
Totals sums;
Traffic current;
bool log_enabled = false;
std::vector<DispatchEntry> entries;
uint64_t first_stage = 0, last_stage = 0;  // ordinals in `ordering` at the reset and at the last dispatch
}  // namespace

Totals& totals() {
    sums.stages = last_stage - first_stage;
    return sums;
}

void reset() {
    sums = {};
    entries.clear();
    first_stage = last_stage = ordering::stage();
}

Traffic& current_traffic() { return current; }

void begin_dispatch(const char* kernel, Uint3 groups, Uint3 threads) {
    current = {};
    sums.dispatches++;
    sums.threads += groups.count() * threads.count();
    last_stage = ordering::stage();
    if (log_enabled) entries.push_back({kernel, groups, threads, last_stage - first_stage, {}});
}

void end_dispatch() {
    sums.traffic.read += current.read;
    sums.traffic.written += current.written;
    sums.traffic.loaded += current.loaded;
    sums.traffic.stored += current.stored;
    if (log_enabled && !entries.empty()) entries.back().traffic = current;
}

void enable_log(bool enabled) {
    log_enabled = enabled;
    entries.clear();
}

const std::vector<DispatchEntry>& log() { return entries; }

}  // namespace metalsim::counters
