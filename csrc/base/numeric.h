// 16-bit and 8-bit floats as bit patterns, and their conversions.
#pragma once

#include <bit>
#include <cstdint>

namespace lily {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
    }
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
inline float f8_e4m3_to_float(uint8_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
    const uint32_t exponent = (bits >> 3) & 0xfu;
    const uint32_t mantissa = bits & 0x7u;
    if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// OCP shared scale: 2^(bits - 127); 255 is NaN.
inline float f8_e8m0_to_float(uint8_t bits) {
    if (bits == 255) return std::bit_cast<float>(0x7fc00000u);
    return bits == 0 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(bits) << 23);
}

}  // namespace lily
