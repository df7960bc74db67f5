// Fault injection: makes the nth call of a kind fail, so that the host's error paths run in tests.
#pragma once
#include <cstdint>
#include <string>

namespace metalsim::faults {

// Arms a fault; false if the kind is unknown.
bool arm(const std::string& kind, uint32_t nth, int code, uint32_t repeat);
void clear();

struct Fault {
    bool fails = false;
    int code = 0;
    explicit operator bool() const { return fails; }
};
// Counts one event of the kind and says whether it fails.
Fault strike(const char* kind);

}  // namespace metalsim::faults
