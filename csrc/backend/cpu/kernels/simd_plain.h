// Sixteen lanes as an array that the compiler vectorises as it can; see simd.h.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/numeric.h"

namespace lily::cpu {
namespace LILY_ISA {

struct F32 {
    float v[kLanes];
    static F32 zero() { return set(0.0f); }
    static F32 set(float x) {
        F32 r;
        for (float& e : r.v) e = x;
        return r;
    }
    static F32 load(const float* p) {
        F32 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static F32 load_bf16(const uint16_t* p) {
        F32 r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = bf16_to_float(p[i]);
        return r;
    }
    static F32 load_int8(const int8_t* p) {
        F32 r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(p[i]);
        return r;
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    template <typename F>
    static F32 map(F32 a, F32 b, F f) {
        F32 r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = f(a.v[i], b.v[i]);
        return r;
    }
    friend F32 operator+(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x + y; });
    }
    friend F32 operator-(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x - y; });
    }
    friend F32 operator*(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x * y; });
    }
    friend F32 operator/(F32 a, F32 b) {
        return map(a, b, [](float x, float y) { return x / y; });
    }
};
inline F32 fma(F32 a, F32 b, F32 c) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return r;
}
inline F32 max(F32 a, F32 b) {
    return F32::map(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline F32 min(F32 a, F32 b) {
    return F32::map(a, b, [](float x, float y) { return x < y ? x : y; });
}
inline F32 abs(F32 a) {
    return F32::map(a, a, [](float x, float) { return std::fabs(x); });
}
inline float sum(F32 a) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    }
    return a.v[0];
}
inline float largest(F32 a) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    }
    return a.v[0];
}

struct I32 {
    int32_t v[kLanes];
    static I32 zero() { return set(0); }
    static I32 set(int32_t x) {
        I32 r;
        for (int32_t& e : r.v) e = x;
        return r;
    }
    static I32 load(const void* p) {
        I32 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    void store(void* p) const { std::memcpy(p, v, sizeof v); }
    template <typename F>
    static I32 map(I32 a, I32 b, F f) {
        I32 r;
        for (int i = 0; i < kLanes; ++i) {
            r.v[i] = static_cast<int32_t>(f(static_cast<uint32_t>(a.v[i]), static_cast<uint32_t>(b.v[i])));
        }
        return r;
    }
    friend I32 operator+(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x + y; });
    }
    friend I32 operator-(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x - y; });
    }
    friend I32 operator&(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x & y; });
    }
    friend I32 operator|(I32 a, I32 b) {
        return map(a, b, [](uint32_t x, uint32_t y) { return x | y; });
    }
};
template <int N>
inline I32 shift_right(I32 a) {
    return I32::map(a, a, [](uint32_t x, uint32_t) { return x >> N; });
}
template <int N>
inline I32 shift_left(I32 a) {
    return I32::map(a, a, [](uint32_t x, uint32_t) { return x << N; });
}
inline F32 to_float(I32 a) {
    F32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(a.v[i]);
    return r;
}
inline I32 round_to_int(F32 a) {
    I32 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
    return r;
}
inline F32 bits_to_float(I32 a) {
    F32 r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline I32 float_to_bits(F32 a) {
    I32 r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline I32 dot_pairs(I32 acc, I32 a, I32 b) {
    for (int i = 0; i < kLanes; ++i) {
        acc.v[i] +=
            static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]) + (a.v[i] >> 16) * (b.v[i] >> 16);
    }
    return acc;
}
inline void transpose_words(const std::byte* rows, int64_t stride, I32 out[4]) {
    for (int i = 0; i < kLanes; ++i) {
        int32_t words[4];
        std::memcpy(words, rows + i * stride, sizeof words);
        for (int j = 0; j < 4; ++j) out[j].v[i] = words[j];
    }
}

// The lanes as 16-bit integers, in each run of eight in the order 0 4 1 5 2 6 3 7.
inline void store_pairs(I32 a, int16_t* out) {
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<int16_t>(a.v[i / 8 * 8 + i % 2 * 4 + i % 8 / 2]);
}

// The low byte of each lane.
inline void store_bytes(I32 a, int8_t* out) {
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<int8_t>(a.v[i]);
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
