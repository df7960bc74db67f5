// Comparing a kernel with another before it is used.
#pragma once

#include <cstddef>
#include <string>

#include "backend/metal/device.h"

namespace lily::metal {

// Numbers between -1 and 1, of two (bf16) or four bytes, without a pattern that tiles could hide.
void fill_with_noise(const DeviceBuffer& buffer, size_t count, size_t bytes);

// "<what> is 1.5 where simdgroup matrices give 0.5", or "" if no number of `got` is farther from that of
// `expected` than a 128th of it and of `share` of the largest.
std::string difference(const DeviceBuffer& expected, const DeviceBuffer& got, size_t count, size_t bytes,
                       float share, const std::string& what);

}  // namespace lily::metal
