// Measures the limits of this machine: sustained read bandwidth and the peaks of its multiply-add units.
//
// Every call starts threads of its own and returns rates per second, one a repetition.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lily::bench {

struct DotUnit {
    std::string name;         // instruction and width in bits, such as "vpdpwssd-512"
    std::string description;  // what it multiplies and adds
    int64_t operations;       // of one instruction, two a multiply-add
};

// The units that this CPU has.
std::vector<DotUnit> dot_units();

// Operations per second of all threads together, operands in registers. Throws InvalidArgument for a unit
// that isn't one of dot_units().
std::vector<double> measure_dot_products(const std::string& unit, int threads, double seconds, int repeats);

// Bytes per second of all threads together; each reads its part of a buffer of `bytes` from start to end,
// again and again.
std::vector<double> measure_read_bandwidth(int64_t bytes, int threads, double seconds, int repeats);

}  // namespace lily::bench
