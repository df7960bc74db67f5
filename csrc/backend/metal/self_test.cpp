#include "backend/metal/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/numeric.h"

namespace lily::metal {
namespace {

constexpr float kTolerance = 1.0f / 128;

float element(const DeviceBuffer& buffer, size_t i, size_t bytes) {
    return bytes == 4 ? buffer.as<const float>()[i] : bf16_to_float(buffer.as<const uint16_t>()[i]);
}

}  // namespace

void fill_with_noise(const DeviceBuffer& buffer, size_t count, size_t bytes) {
    uint32_t state = 1;
    for (size_t i = 0; i < count; ++i) {
        state = state * 1664525 + 1013904223;
        const float value = static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
        if (bytes == 4) {
            buffer.as<float>()[i] = value;
        } else {
            buffer.as<uint16_t>()[i] = float_to_bf16(value);
        }
    }
}

std::string difference(const DeviceBuffer& expected, const DeviceBuffer& got, size_t count, size_t bytes,
                       float share, const std::string& what) {
    float largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(element(expected, i, bytes)));
    for (size_t i = 0; i < count; ++i) {
        const float a = element(expected, i, bytes);
        const float b = element(got, i, bytes);
        if (!(std::abs(a - b) <= kTolerance * (std::abs(a) + share * largest))) {
            return what + " is " + std::to_string(b) + " where simdgroup matrices give " + std::to_string(a);
        }
    }
    return "";
}

}  // namespace lily::metal
