// Row-wise kernels: norms, quantisation of activations, SwiGLU. Bound by cache bandwidth.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "backend/cpu/kernels/simd.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    F32 squares = F32::zero();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const F32 v = F32::load(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < size; ++i) total = std::fma(x[i], x[i], total);
    const float inverse = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes) {
        (F32::load(x + i) * F32::set(inverse) * F32::load(weight + i)).store(out + i);
    }
    for (; i < size; ++i) out[i] = x[i] * inverse * weight[i];
}

namespace {

// The block's integers as bytes: even columns to the first two rows of 64 bytes (high, low), odd ones to the
// others; this block's 32 bytes of each.
void split_digits(const I32 q[4], int8_t* rows) {
    int8_t high[kBlock];
    int8_t low[kBlock];
    for (int part = 0; part < 4; ++part) {
        // (q + 128) >> 8 with its sign: the offset keeps the shifted number positive.
        const I32 shifted = shift_right<8>(q[part] + I32::set(128 + (1 << 16)));
        store_bytes(shifted, high + part * kLanes);
        store_bytes(q[part], low + part * kLanes);
    }
    for (int i = 0; i < kBlock / 2; ++i) {
        rows[i] = high[2 * i];
        rows[kBlock + i] = low[2 * i];
        rows[2 * kBlock + i] = high[2 * i + 1];
        rows[3 * kBlock + i] = low[2 * i + 1];
    }
}

}  // namespace

// 16-bit integers with a scale per 64 columns: scale = max|x| / 32639, integer = round(x / scale). The
// largest integer is the largest one that is 256 times a signed byte plus a signed byte. A block with a value
// that is not finite gets a NaN scale, so that the fault shows in the result.
constexpr float kTop = 127 * 256 + 127;

void quantize_row(const float* x, int64_t cols, int16_t* integers, int8_t* digits, float* scales,
                  float* sums) {
    const int64_t blocks = (cols + kBlock - 1) / kBlock;
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float block[kBlock] = {};
        const int64_t width = std::min(kBlock, cols - b * kBlock);
        std::memcpy(block, x + b * kBlock, static_cast<size_t>(width) * sizeof(float));
        F32 peak = F32::zero();
        F32 faults = F32::zero();
        for (int i = 0; i < kBlock; i += kLanes) {
            const F32 v = F32::load(block + i);
            peak = max(abs(v), peak);
            faults = fma(v, F32::zero(), faults);
        }
        const float top = largest(peak);
        const bool sound = sum(faults) == 0.0f;
        scales[b] = sound ? top / kTop : std::numeric_limits<float>::quiet_NaN();
        // A top below the normal range would make the inverse infinite: such a block counts as zero.
        const bool usable = sound && top > 1e-30f;
        if (sound && !usable) scales[b] = 0.0f;
        const F32 inverse = F32::set(usable ? kTop / top : 0.0f);
        I32 q[4];
        int32_t total[4];
        for (int part = 0; part < 4; ++part) {
            q[part] = usable ? round_to_int(F32::load(block + part * kLanes) * inverse) : I32::zero();
            store_pairs(q[part], integers + b * kBlock + part * kLanes);
            int32_t lanes[kLanes];
            q[part].store(lanes);
            total[part] = std::accumulate(lanes, lanes + kLanes, 0);
        }
        if (digits) split_digits(q, digits + b / 2 * 4 * kBlock + b % 2 * 32);
        float* sixteen = sums + b * 4;
        float* thirty_two = sums + blocks * 4 + b * 2;
        float* sixty_four = sums + blocks * 6 + b;
        for (int part = 0; part < 4; ++part) sixteen[part] = scales[b] * static_cast<float>(total[part]);
        thirty_two[0] = scales[b] * static_cast<float>(total[0] + total[1]);
        thirty_two[1] = scales[b] * static_cast<float>(total[2] + total[3]);
        sixty_four[0] = scales[b] * static_cast<float>(total[0] + total[1] + total[2] + total[3]);
    }
}

// out = silu(gate) * up
void swiglu(const float* gate, const float* up, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        (silu(F32::load(gate + i)) * F32::load(up + i)).store(out + i);
    }
    if (i < count) {
        float g[kLanes] = {};
        float u[kLanes] = {};
        const size_t bytes = static_cast<size_t>(count - i) * sizeof(float);
        std::memcpy(g, gate + i, bytes);
        std::memcpy(u, up + i, bytes);
        (silu(F32::load(g)) * F32::load(u)).store(g);
        std::memcpy(out + i, g, bytes);
    }
}

void add_scaled(const float* x, float scale, int64_t count, float* out) {
    const F32 s = F32::set(scale);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) fma(F32::load(x + i), s, F32::load(out + i)).store(out + i);
    for (; i < count; ++i) out[i] = std::fma(x[i], scale, out[i]);
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
