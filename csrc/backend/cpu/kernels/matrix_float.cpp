// W x in fp32 for any stored form: 16 outputs in the lanes, four interleaved sums along the columns,
//   acc[c % 4] = fma(w[c], x[c], acc[c % 4]);  out = (acc[0] + acc[1]) + (acc[2] + acc[3]).
// The plain reference of matrix_integer, and the kernel of unquantised and micro-scaled 8-bit weights.
#include <cmath>

#include "backend/cpu/kernels/expand.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

constexpr int64_t kTileRows = 4;

// The number that a code of a row stands for, before scale and bias.
float code_value(const Matrix& w, const std::byte* row, int64_t column) {
    if (w.format == Format::mxfp8) return f8_e4m3_to_float(static_cast<uint8_t>(row[column]));
    const int64_t bit = column * w.bits;
    uint32_t window = static_cast<uint8_t>(row[bit / 8]);
    if (bit % 8 + w.bits > 8) window |= static_cast<uint32_t>(static_cast<uint8_t>(row[bit / 8 + 1])) << 8;
    const uint32_t code = (window >> (bit % 8)) & ((1u << w.bits) - 1);
    return static_cast<float>(w.format == Format::affine ? static_cast<int>(code) : kE2m1Doubled[code]);
}

// One column of the panel, for what the vector paths below don't reach.
F32 column_of(const Panel& panel, const float* scales, const float* biases, int64_t column) {
    const Matrix& w = *panel.weight;
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        if (!w.quantized()) {
            lanes[i] = stored_float(panel.rows + i * panel.stride, w.dtype, column);
            continue;
        }
        const float code = code_value(w, panel.rows + i * panel.stride, column);
        const int64_t at = column / w.group * kLanes + i;
        lanes[i] = biases ? std::fma(scales[at], code, biases[at]) : scales[at] * code;
    }
    return F32::load(lanes);
}

// The whole panel, [cols, 16] floats.
void expand_floats(const Panel& panel, const float* scales, const float* biases, float* out) {
    const Matrix& w = *panel.weight;
    int64_t c = 0;
    if (w.format == Format::affine) {
        for (; c + kChunk <= w.cols; c += kChunk) {
            I32 words[kChunkWords];
            expand_words(panel, c, words);
            for (int k = 0; k < kChunkWords; ++k) {
                const I32 codes[2] = {words[k] & I32::set(0xffff), shift_right<16>(words[k])};
                for (int half = 0; half < 2; ++half) {
                    const int64_t column = c + k / 4 * 8 + k % 4 + 4 * half;
                    const int64_t at = column / w.group * kLanes;
                    fma(F32::load(scales + at), to_float(codes[half]), F32::load(biases + at))
                        .store(out + column * kLanes);
                }
            }
        }
    } else if (!w.quantized() && w.dtype != Dtype::f16) {
        const int64_t step = w.dtype == Dtype::f32 ? 4 : 8;
        for (; c + step <= w.cols; c += step) {
            I32 t[4];
            transpose_words(panel.rows + c * static_cast<int64_t>(dtype_bytes(w.dtype)), panel.stride, t);
            for (int j = 0; j < 4; ++j) {
                if (step == 4) {
                    t[j].store(out + (c + j) * kLanes);
                } else {
                    shift_left<16>(t[j]).store(out + (c + 2 * j) * kLanes);
                    (t[j] & I32::set(static_cast<int32_t>(0xffff0000u)))
                        .store(out + (c + 2 * j + 1) * kLanes);
                }
            }
        }
    }
    for (; c < w.cols; ++c) column_of(panel, scales, biases, c).store(out + c * kLanes);
}

template <int M>
void multiply(const float* weights, const RowsView& x, const int64_t* rows, F32* out) {
    F32 acc[M][4];
    const float* values[M];
    for (int m = 0; m < M; ++m) {
        values[m] = x.values + rows[m] * x.cols;
        for (F32& a : acc[m]) a = F32::zero();
    }
    int64_t c = 0;
    for (; c + 4 <= x.cols; c += 4) {
        for (int q = 0; q < 4; ++q) {
            const F32 w = F32::load(weights + (c + q) * kLanes);
            for (int m = 0; m < M; ++m) acc[m][q] = fma(w, F32::set(values[m][c + q]), acc[m][q]);
        }
    }
    for (; c < x.cols; ++c) {
        const F32 w = F32::load(weights + c * kLanes);
        for (int m = 0; m < M; ++m) acc[m][c % 4] = fma(w, F32::set(values[m][c]), acc[m][c % 4]);
    }
    for (int m = 0; m < M; ++m) out[m] = (acc[m][0] + acc[m][1]) + (acc[m][2] + acc[m][3]);
}

}  // namespace

void read_row(const Matrix& table, int64_t row, float* out) {
    const Matrix one = table.rows_from(row, 1);
    for (int64_t c = 0; c < one.cols; ++c) {
        if (!one.quantized()) {
            out[c] = stored_float(one.data, one.dtype, c);
            continue;
        }
        const float scale = group_float(one, one.scales, c / one.group);
        const float code = code_value(one, one.data, c);
        out[c] =
            one.biases ? std::fma(scale, code, group_float(one, one.biases, c / one.group)) : scale * code;
    }
}

void matrix_float(const MatrixTask& task) {
    const Matrix& w = *task.weight;
    for (int64_t p = 0; p < task.panels; ++p) {
        float* expanded = task.scratch + 2 * w.cols;
        const Panel panel(w, task.first_row + p * kPanel,
                          reinterpret_cast<std::byte*>(expanded + w.cols * kLanes));
        const float* scales = task.scratch;
        const float* biases = nullptr;
        if (w.quantized()) {
            load_group_floats(panel, panel.scales, task.scratch);
            if (w.biases) {
                float* at = task.scratch + w.cols / w.group * kLanes;
                load_group_floats(panel, panel.biases, at);
                biases = at;
            }
        }
        expand_floats(panel, scales, biases, expanded);
        for (int64_t begin = 0; begin < task.count; begin += kTileRows) {
            const int64_t count = task.count - begin < kTileRows ? task.count - begin : kTileRows;
            int64_t rows[kTileRows];
            for (int64_t i = 0; i < kTileRows; ++i) {
                const int64_t row = begin + (i < count ? i : 0);
                rows[i] = task.row_index ? task.row_index[row] : row;
            }
            F32 out[kTileRows];
            if (count == 1) {
                multiply<1>(expanded, *task.x, rows, out);
            } else {
                multiply<kTileRows>(expanded, *task.x, rows, out);
            }
            for (int64_t i = 0; i < count; ++i) {
                panel.store(out[i], task.out + (begin + i) * task.out_stride + p * kPanel);
            }
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
