// One row against a panel of 4-bit weights on byte dot products: the codes stay bytes, the activation's two
// digits meet them one after the other, and 16 rows of partial sums are added across at once.
//
// The same integers, scales and order as the kernels for more rows, so the same bits. Bound by memory
// bandwidth.
#pragma once

#include "backend/cpu/kernels/expand.h"

namespace lily::cpu {
namespace LILY_ISA {

#if defined(LILY_BYTE_DOTS)

constexpr int64_t kByteColumns = 128;  // two blocks: 64 bytes of a row

inline bool fits_bytes(const Matrix& w, const RowsView& x) {
    return x.digits && w.format == Format::affine && w.bits == 4 && w.group >= kBlock &&
           w.cols % kByteColumns == 0 && w.rows >= kLanes;
}

// The 16 results of a panel for activation row `row`; scales and biases as [groups, 16] floats.
inline F32 multiply_bytes(const Panel& panel, const float* scales, const float* biases, const RowsView& x,
                          int64_t row, const PanelAhead& ahead) {
    const Matrix& w = *panel.weight;
    const int8_t* digits = x.digits + row * x.digit_stride();
    const float* x_scales = x.scales + row * x.blocks();
    const float* x_sums = x.sums_of(row, kBlock);
    const int64_t groups_per_pair = w.group == kBlock ? 2 : 1;
    const I32 nibble = I32::set(0x0f0f0f0f);
    F32 acc = F32::zero();
    for (int64_t pair = 0; pair * kByteColumns < w.cols; ++pair) {
        ahead.step(pair);
        const I32 even_high = I32::load(digits + pair * 4 * kBlock);
        const I32 even_low = I32::load(digits + pair * 4 * kBlock + kBlock);
        const I32 odd_high = I32::load(digits + pair * 4 * kBlock + 2 * kBlock);
        const I32 odd_low = I32::load(digits + pair * 4 * kBlock + 3 * kBlock);
        const std::byte* codes = panel.rows + pair * kByteColumns / 2;
        I32 sums[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            const I32 packed = I32::load(codes + i * panel.stride);
            const I32 even = packed & nibble;
            const I32 odd = shift_right<4>(packed) & nibble;
            const I32 high = dot_bytes(dot_bytes(I32::zero(), even, even_high), odd, odd_high);
            sums[i] = dot_bytes(dot_bytes(shift_left<8>(high), even, even_low), odd, odd_low);
        }
        I32 blocks[2];
        sum_halves(sums, blocks);
        for (int b = 0; b < 2; ++b) {
            const int64_t block = 2 * pair + b;
            const int64_t at = (pair * groups_per_pair + (groups_per_pair == 2 ? b : 0)) * kLanes;
            acc = fma(to_float(blocks[b]), F32::load(scales + at) * F32::set(x_scales[block]), acc);
            if (biases) acc = fma(F32::load(biases + at), F32::set(x_sums[block]), acc);
        }
    }
    return acc;
}

#endif

}  // namespace LILY_ISA
}  // namespace lily::cpu
