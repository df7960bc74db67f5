// Sixteen lanes as four Neon registers, with dot products of bytes; see simd.h.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

namespace lily::cpu {
namespace LILY_ISA {

struct F32 {
    float32x4_t v[4];
    template <typename F>
    static F32 each(F f) {
        return {{f(0), f(1), f(2), f(3)}};
    }
    static F32 zero() { return set(0.0f); }
    static F32 set(float x) {
        const float32x4_t all = vdupq_n_f32(x);
        return {{all, all, all, all}};
    }
    static F32 load(const float* p) {
        return each([=](int i) { return vld1q_f32(p + 4 * i); });
    }
    static F32 load_bf16(const uint16_t* p) {
        return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
    }
    static F32 load_int8(const int8_t* p) {
        const int8x16_t bytes = vld1q_s8(p);
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
        const int16x8_t high = vmovl_s8(vget_high_s8(bytes));
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                 vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
    }
    void store(float* p) const {
        for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v[i]);
    }
    friend F32 operator+(F32 a, F32 b) {
        return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
    }
    friend F32 operator-(F32 a, F32 b) {
        return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
    }
    friend F32 operator*(F32 a, F32 b) {
        return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
    }
    friend F32 operator/(F32 a, F32 b) {
        return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
    }
};
inline F32 fma(F32 a, F32 b, F32 c) {
    return F32::each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// Of two numbers that are not ordered, the second one, as on x86.
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline F32 max(F32 a, F32 b) {
    return F32::each([&](int i) { return larger(a.v[i], b.v[i]); });
}
inline F32 min(F32 a, F32 b) {
    return F32::each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F32 abs(F32 a) {
    return F32::each([&](int i) { return vabsq_f32(a.v[i]); });
}
// All lanes joined by halving the vector: the same order on every machine.
template <typename Join>
inline float halve(F32 a, Join join) {
    const float32x4_t four = join(join(a.v[0], a.v[2]), join(a.v[1], a.v[3]));
    const float32x4_t two = join(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(join(two, vextq_f32(two, two, 1)), 0);
}
inline float sum(F32 a) {
    return halve(a, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}
inline float largest(F32 a) { return halve(a, larger); }

struct I32 {
    int32x4_t v[4];
    template <typename F>
    static I32 each(F f) {
        return {{f(0), f(1), f(2), f(3)}};
    }
    static I32 zero() { return set(0); }
    static I32 set(int32_t x) {
        const int32x4_t all = vdupq_n_s32(x);
        return {{all, all, all, all}};
    }
    static I32 load(const void* p) {
        const auto* bytes = static_cast<const uint8_t*>(p);
        return each([=](int i) { return vreinterpretq_s32_u8(vld1q_u8(bytes + 16 * i)); });
    }
    void store(void* p) const {
        auto* bytes = static_cast<uint8_t*>(p);
        for (int i = 0; i < 4; ++i) vst1q_u8(bytes + 16 * i, vreinterpretq_u8_s32(v[i]));
    }
    friend I32 operator+(I32 a, I32 b) {
        return each([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
    }
    friend I32 operator-(I32 a, I32 b) {
        return each([&](int i) { return vsubq_s32(a.v[i], b.v[i]); });
    }
    friend I32 operator&(I32 a, I32 b) {
        return each([&](int i) { return vandq_s32(a.v[i], b.v[i]); });
    }
    friend I32 operator|(I32 a, I32 b) {
        return each([&](int i) { return vorrq_s32(a.v[i], b.v[i]); });
    }
};
template <int N>
inline I32 shift_right(I32 a) {
    return I32::each(
        [&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)); });
}
template <int N>
inline I32 shift_left(I32 a) {
    return I32::each([&](int i) { return vshlq_n_s32(a.v[i], N); });
}
inline F32 to_float(I32 a) {
    return F32::each([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline I32 round_to_int(F32 a) {
    return I32::each([&](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline F32 bits_to_float(I32 a) {
    return F32::each([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
inline I32 float_to_bits(F32 a) {
    return I32::each([&](int i) { return vreinterpretq_s32_f32(a.v[i]); });
}

inline I32 dot_pairs(I32 acc, I32 a, I32 b) {
    return I32::each([&](int i) {
        const int16x8_t x = vreinterpretq_s16_s32(a.v[i]);
        const int16x8_t y = vreinterpretq_s16_s32(b.v[i]);
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
        return vaddq_s32(acc.v[i], vpaddq_s32(low, vmull_high_s16(x, y)));
    });
}

inline void transpose_words(const std::byte* rows, int64_t stride, I32 out[4]) {
    for (int group = 0; group < 4; ++group) {
        int32x4_t r[4];
        for (int i = 0; i < 4; ++i) {
            const std::byte* row = rows + (4 * group + i) * stride;
            r[i] = vreinterpretq_s32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(row)));
        }
        const auto pair = [](int32x4_t a, int32x4_t b, bool upper) {
            return vreinterpretq_s64_s32(upper ? vtrn2q_s32(a, b) : vtrn1q_s32(a, b));
        };
        const int64x2_t even[2] = {pair(r[0], r[1], false), pair(r[2], r[3], false)};
        const int64x2_t odd[2] = {pair(r[0], r[1], true), pair(r[2], r[3], true)};
        out[0].v[group] = vreinterpretq_s32_s64(vtrn1q_s64(even[0], even[1]));
        out[1].v[group] = vreinterpretq_s32_s64(vtrn1q_s64(odd[0], odd[1]));
        out[2].v[group] = vreinterpretq_s32_s64(vtrn2q_s64(even[0], even[1]));
        out[3].v[group] = vreinterpretq_s32_s64(vtrn2q_s64(odd[0], odd[1]));
    }
}

// The lanes as 16-bit integers, in each run of eight in the order 0 4 1 5 2 6 3 7.
inline void store_pairs(I32 a, int16_t* out) {
    for (int run = 0; run < 2; ++run) {
        const int16x4_t low = vmovn_s32(a.v[2 * run]);
        const int16x4_t high = vmovn_s32(a.v[2 * run + 1]);
        vst1q_s16(out + 8 * run, vcombine_s16(vzip1_s16(low, high), vzip2_s16(low, high)));
    }
}

// The low byte of each lane.
inline void store_bytes(I32 a, int8_t* out) {
    for (int half = 0; half < 2; ++half) {
        const int16x8_t words = vcombine_s16(vmovn_s32(a.v[2 * half]), vmovn_s32(a.v[2 * half + 1]));
        vst1_s8(out + 8 * half, vmovn_s16(words));
    }
}

#define LILY_BYTE_DOTS 1  // the byte operations below exist

// `a` holds numbers up to 127: its signed bytes are the unsigned ones.
inline I32 dot_bytes(I32 acc, I32 a, I32 b) {
    return I32::each([&](int i) {
        return vdotq_s32(acc.v[i], vreinterpretq_s8_s32(a.v[i]), vreinterpretq_s8_s32(b.v[i]));
    });
}

inline void sum_halves(const I32* rows, I32 out[2]) {
    for (int half = 0; half < 2; ++half) {
        for (int group = 0; group < 4; ++group) {
            const auto part = [&](int i) {
                const I32& row = rows[4 * group + i];
                return vaddq_s32(row.v[2 * half], row.v[2 * half + 1]);
            };
            out[half].v[group] = vpaddq_s32(vpaddq_s32(part(0), part(1)), vpaddq_s32(part(2), part(3)));
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
