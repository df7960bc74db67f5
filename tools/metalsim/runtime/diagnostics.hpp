// What the checker found. Equal reports (same kind, same place) are counted, not repeated.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace metalsim {

struct Diagnostic {
    std::string kind, kernel, message, where;
    uint64_t count = 1;
};

// Where a report belongs: the instruction that made the access, or a place in the source that is known.
struct Place {
    void* pc = nullptr;
    std::string source = {};
};

void report(const char* kind, const std::string& message, Place place = {});

// Names the kernel and the thread in reports that follow; empty outside a dispatch.
void set_report_context(const char* kernel);

size_t diagnostic_count();
// Sum of all counts: grows with every report, also repeated ones.
uint64_t report_total();
// The report made most recently, as "kind: message (where)"; "" if none since the last clear.
std::string last_report();
std::vector<Diagnostic> diagnostics();
void clear_diagnostics();

}  // namespace metalsim
