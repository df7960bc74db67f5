// Weights of a panel (16 output rows) from their stored form to words or floats, one lane per output row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/prefetch.h"
#include "backend/cpu/kernels/simd.h"
#include "base/numeric.h"

namespace lily::cpu {
namespace LILY_ISA {

constexpr int kChunk = 32;               // columns expanded at a time
constexpr int kChunkWords = kChunk / 2;  // words of two 16-bit codes

// Twice the value of each e2m1 code.
constexpr int16_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Sixteen rows of a matrix that hold output rows [first, first + 16). At the end of the matrix the panel is
// moved up: its first `skip` lanes were computed before and are not stored. A matrix of fewer rows is copied
// and padded.
struct Panel {
    const Matrix* weight;
    const std::byte* rows;
    const std::byte* scales;
    const std::byte* biases;
    int64_t stride;        // bytes between rows
    int64_t scale_stride;  // the same for scales and biases
    int64_t skip;          // lanes to leave out
    int64_t valid;         // lanes to store

    // `padding` has room for kLanes rows of this matrix, with scales and biases (see panel_padding_bytes).
    Panel(const Matrix& w, int64_t first, std::byte* padding)
        : weight(&w), stride(w.row_bytes()), scale_stride(w.scale_row_bytes()) {
        const int64_t start = first + kLanes <= w.rows ? first : w.rows >= kLanes ? w.rows - kLanes : 0;
        skip = first - start;
        valid = w.rows - first < kLanes ? w.rows - first : kLanes;
        const auto place = [&](const std::byte* base, int64_t width) -> const std::byte* {
            if (!base || w.rows >= kLanes) return base ? base + start * width : nullptr;
            std::memcpy(padding, base, static_cast<size_t>(w.rows * width));
            const std::byte* copy = padding;
            padding += kLanes * width;
            return copy;
        };
        rows = place(w.data, stride);
        scales = place(w.scales, scale_stride);
        biases = place(w.biases, scale_stride);
    }

    void store(F32 result, float* out) const {
        if (valid == kLanes) return result.store(out);
        float lanes[kLanes];
        result.store(lanes);
        std::memcpy(out, lanes + skip, static_cast<size_t>(valid) * sizeof(float));
    }
};

// The panel that is read after panel `p` of a task, asked for in equal steps while that one is read.
class PanelAhead {
  public:
    PanelAhead(const MatrixTask& task, int64_t p, int64_t steps) {
        PanelPlace place{task.weight, task.first_row + (p + 1) * kPanel};
        if (p + 1 == task.panels) place = task.after;
        if (!task.prefetch || !place.weight) {
            codes_ = scales_ = biases_ = task.weight->data;
            return;
        }
        const Matrix& w = *place.weight;
        const auto at = [&](const std::byte* base, int64_t width) {
            return base ? base + place.row * width : w.data;
        };
        codes_ = w.data + place.row * w.row_bytes();
        scales_ = at(w.scales, w.scale_row_bytes());
        biases_ = at(w.biases, w.scale_row_bytes());
        code_lines_ = (kLanes * w.row_bytes() / steps + 63) / 64;
        scale_step_ = kLanes * w.scale_row_bytes() / steps;
    }
    void step(int64_t index) const {
        for (int64_t i = 0; i < code_lines_; ++i) prefetch(codes_ + (index * code_lines_ + i) * 64);
        prefetch(scales_ + index * scale_step_);
        prefetch(biases_ + index * scale_step_);
    }

  private:
    const std::byte* codes_;
    const std::byte* scales_;
    const std::byte* biases_;
    int64_t code_lines_ = 0;
    int64_t scale_step_ = 0;
};

inline int64_t panel_padding_bytes(int64_t cols) { return kLanes * cols * 6; }

template <int Bits, size_t I>
inline I32 code_at(const I32* words) {
    constexpr int kBit = static_cast<int>(I) * Bits;
    constexpr int kWord = kBit / 32;
    constexpr int kShift = kBit % 32;
    I32 v = words[kWord];
    if constexpr (kShift != 0) v = shift_right<kShift>(v);
    if constexpr (kShift + Bits > 32) v = v | shift_left<32 - kShift>(words[kWord + 1]);
    return v & I32::set((1 << Bits) - 1);
}

template <int Bits, size_t... K>
inline void pair_codes(const I32* words, I32* out, std::index_sequence<K...>) {
    // word 4 r + q of run r holds columns 8 r + q and 8 r + q + 4
    ((out[K] = code_at<Bits, K / 4 * 8 + K % 4>(words) |
               shift_left<16>(code_at<Bits, K / 4 * 8 + K % 4 + 4>(words))),
     ...);
}

// Columns [column, column + 32) of the panel as pairs of codes.
template <int Bits>
inline void expand_codes(const Panel& panel, int64_t column, I32* out) {
    constexpr int kBytes = kChunk * Bits / 8;
    const int64_t offset = column * Bits / 8;
    if constexpr (Bits == 4) {
        I32 t[4];
        transpose_words(panel.rows + offset, panel.stride, t);
        const I32 mask = I32::set(0x000f000f);
        for (int j = 0; j < 4; ++j) {
            out[4 * j] = t[j] & mask;
            out[4 * j + 1] = shift_right<4>(t[j]) & mask;
            out[4 * j + 2] = shift_right<8>(t[j]) & mask;
            out[4 * j + 3] = shift_right<12>(t[j]) & mask;
        }
    } else {
        // Rows are copied first: a chunk need not end on the 16 bytes that a transposition reads.
        alignas(64) std::byte copy[kLanes][kChunk];
        for (int i = 0; i < kLanes; ++i) std::memcpy(copy[i], panel.rows + i * panel.stride + offset, kBytes);
        I32 words[8];
        for (int half = 0; half < (kBytes + 15) / 16; ++half) {
            transpose_words(copy[0] + 16 * half, kChunk, words + 4 * half);
        }
        pair_codes<Bits>(words, out, std::make_index_sequence<kChunkWords>());
    }
}

// e2m1 codes as twice their value, which is a small integer.
inline void expand_e2m1(const Panel& panel, int64_t column, I32* out) {
    alignas(64) int16_t values[2 * kLanes];
    expand_codes<4>(panel, column, out);
    for (int k = 0; k < kChunkWords; ++k) {
        out[k].store(values);
        for (int16_t& value : values) value = kE2m1Doubled[value & 15];
        out[k] = I32::load(values);
    }
}

inline void expand_words(const Panel& panel, int64_t column, I32* out) {
    const Matrix& w = *panel.weight;
    if (w.format != Format::affine) return expand_e2m1(panel, column, out);
    switch (w.bits) {
        case 2:
            return expand_codes<2>(panel, column, out);
        case 3:
            return expand_codes<3>(panel, column, out);
        case 5:
            return expand_codes<5>(panel, column, out);
        case 6:
            return expand_codes<6>(panel, column, out);
        case 8:
            return expand_codes<8>(panel, column, out);
        default:
            return expand_codes<4>(panel, column, out);
    }
}

inline float stored_float(const std::byte* p, Dtype dtype, int64_t index) {
    if (dtype == Dtype::f32) {
        float value;
        std::memcpy(&value, p + index * 4, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, p + index * 2, 2);
    return dtype == Dtype::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Scale (or bias) `g` of a row. Micro-scaled formats carry the factor 1/2 that undoes the doubled e2m1
// values.
inline float group_float(const Matrix& w, const std::byte* row, int64_t g) {
    if (w.format == Format::affine) return stored_float(row, w.dtype, g);
    const auto byte = static_cast<uint8_t>(row[g]);
    if (w.format == Format::nvfp4) return 0.5f * f8_e4m3_to_float(byte);
    return w.format == Format::mxfp4 ? 0.5f * f8_e8m0_to_float(byte) : f8_e8m0_to_float(byte);
}

// Scales (or biases) of a panel, [groups, 16] floats.
inline void load_group_floats(const Panel& panel, const std::byte* base, float* out) {
    const Matrix& w = *panel.weight;
    const int64_t groups = w.cols / w.group;
    int64_t g = 0;
    if (w.format == Format::affine && w.dtype == Dtype::bf16) {
        for (; g + 8 <= groups; g += 8) {
            I32 t[4];
            transpose_words(base + g * 2, panel.scale_stride, t);
            for (int j = 0; j < 4; ++j) {
                shift_left<16>(t[j]).store(out + (g + 2 * j) * kLanes);
                (t[j] & I32::set(static_cast<int32_t>(0xffff0000u))).store(out + (g + 2 * j + 1) * kLanes);
            }
        }
    }
    for (; g < groups; ++g) {
        for (int i = 0; i < kLanes; ++i)
            out[g * kLanes + i] = group_float(w, base + i * panel.scale_stride, g);
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
