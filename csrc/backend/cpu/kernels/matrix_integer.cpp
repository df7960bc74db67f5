// W x for quantised W by integer dot products on the stored codes.
//
// For one output and one block of columns (the scale group, at most 64 columns):
//   acc = fma(float(sum of code * integer), scale * x_scale, acc);  acc = fma(bias, sum of x over the block,
//   acc)
// with blocks in ascending order. The integer sum is exact, so neither the number of rows, nor the panel, nor
// the instruction set changes a bit. Few rows expand codes in registers; many rows expand a panel once into
// cache. Bound by memory bandwidth for few rows, by the dot-product unit for many.
#include "backend/cpu/kernels/expand.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

// More rows than this share one expanded panel. Below, each chunk is expanded where it is used.
constexpr int64_t kFewRows = 8;

struct Scales {
    const float* scale;
    const float* bias;  // null without biases
    int64_t group;
};

// Chunks straight from memory.
struct StoredCodes {
    const Panel* panel;
    void load(int64_t chunk, I32* out) const {
        panel->prefetch(chunk, kChunk * 4 / 8);
        expand_codes<4>(*panel, chunk * kChunk, out);
    }
};

struct StoredAny {
    const Panel* panel;
    void load(int64_t chunk, I32* out) const {
        panel->prefetch(chunk, kChunk * panel->weight->bits / 8);
        expand_words(*panel, chunk * kChunk, out);
    }
};

// Chunks that were expanded before.
struct ExpandedCodes {
    const int32_t* words;
    void load(int64_t chunk, I32* out) const {
        for (int k = 0; k < kChunkWords; ++k) out[k] = I32::load(words + (chunk * kChunkWords + k) * kLanes);
    }
};

inline int32_t word_at(const int16_t* integers, int64_t word) {
    int32_t value;
    std::memcpy(&value, integers + 2 * word, 4);
    return value;
}

// M rows against one panel. Block: columns per scale, 16, 32 or 64.
template <int M, int Block, typename Source>
void accumulate(const Source& source, const Scales& scales, const RowsView& x, const int64_t* rows,
                F32* acc) {
    constexpr int kSplit = M >= 4 ? 1 : M >= 2 ? 2 : 4;  // independent sums hide the latency of a dot product
    const int64_t padded = x.padded();
    const int64_t blocks = x.blocks();
    const int16_t* integers[M];
    const float* x_scales[M];
    const float* x_sums[M];
    for (int m = 0; m < M; ++m) {
        integers[m] = x.integers + rows[m] * padded;
        x_scales[m] = x.scales + rows[m] * blocks;
        x_sums[m] = x.sums_of(rows[m], Block);
        acc[m] = F32::zero();
    }
    const int64_t chunks = x.cols / kChunk;
    I32 sums[M][kSplit];
    const auto clear = [&] {
        for (int m = 0; m < M; ++m) {
            for (int s = 0; s < kSplit; ++s) sums[m][s] = I32::zero();
        }
    };
    const auto flush = [&](int64_t column) {
        const int64_t at = column / scales.group * kLanes;
        const F32 scale = F32::load(scales.scale + at);
        for (int m = 0; m < M; ++m) {
            I32 total = sums[m][0];
            for (int s = 1; s < kSplit; ++s) total = total + sums[m][s];
            acc[m] = fma(to_float(total), scale * F32::set(x_scales[m][column / kBlock]), acc[m]);
            if (scales.bias)
                acc[m] = fma(F32::load(scales.bias + at), F32::set(x_sums[m][column / Block]), acc[m]);
        }
        clear();
    };
    clear();
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        I32 words[kChunkWords];
        source.load(chunk, words);
        for (int k = 0; k < kChunkWords; ++k) {
            for (int m = 0; m < M; ++m) {
                I32& sum = sums[m][k % kSplit];
                sum = dot_pairs(sum, words[k], I32::set(word_at(integers[m], chunk * kChunkWords + k)));
            }
            if (Block == 16 && k == 7) flush(chunk * kChunk);
        }
        const int64_t end = (chunk + 1) * kChunk;
        if (Block == 16) flush(end - 16);
        if (Block == 32 || (Block == 64 && (end % 64 == 0 || chunk + 1 == chunks))) flush(end - kChunk);
    }
}

template <int Block, typename Source, int M = static_cast<int>(kFewRows)>
void accumulate_rows(int64_t count, const Source& source, const Scales& scales, const RowsView& x,
                     const int64_t* rows, F32* acc) {
    if constexpr (M > 1) {
        if (count < M) return accumulate_rows<Block, Source, M - 1>(count, source, scales, x, rows, acc);
    }
    accumulate<M, Block>(source, scales, x, rows, acc);
}

template <typename Source>
void run_rows(const MatrixTask& task, const Panel& panel, const Source& source, const Scales& scales,
              int64_t offset) {
    for (int64_t begin = 0; begin < task.count; begin += kFewRows) {
        const int64_t count = task.count - begin < kFewRows ? task.count - begin : kFewRows;
        int64_t rows[kFewRows];
        for (int64_t i = 0; i < count; ++i) rows[i] = task.row_index ? task.row_index[begin + i] : begin + i;
        F32 acc[kFewRows];
        const int64_t block = task.weight->group < kBlock ? task.weight->group : kBlock;
        if (block == 64) {
            accumulate_rows<64>(count, source, scales, *task.x, rows, acc);
        } else if (block == 32) {
            accumulate_rows<32>(count, source, scales, *task.x, rows, acc);
        } else {
            accumulate_rows<16>(count, source, scales, *task.x, rows, acc);
        }
        for (int64_t i = 0; i < count; ++i) {
            float* out = task.out + (begin + i) * task.out_stride + offset;
            if (panel.valid == kLanes) {
                acc[i].store(out);
            } else {
                float lanes[kLanes];
                acc[i].store(lanes);
                std::memcpy(out, lanes, static_cast<size_t>(panel.valid) * sizeof(float));
            }
        }
    }
}

}  // namespace

// A panel's scales and biases (a group has at least 16 columns), then its expanded codes.
int64_t matrix_scratch_floats(int64_t cols) { return 2 * cols + cols * kLanes; }

void matrix_integer(const MatrixTask& task) {
    const Matrix& w = *task.weight;
    for (int64_t p = 0; p < task.panels; ++p) {
        const Panel panel(w, task.first_row + p * kPanel);
        const int64_t groups = w.cols / w.group;
        Scales scales{task.scratch, nullptr, w.group};
        load_group_floats(panel, w.scales, task.scratch);
        if (w.biases) {
            load_group_floats(panel, w.biases, task.scratch + groups * kLanes);
            scales.bias = task.scratch + groups * kLanes;
        }
        if (task.count > kFewRows) {
            auto* words = reinterpret_cast<int32_t*>(task.scratch + 2 * w.cols);
            for (int64_t chunk = 0; chunk * kChunk < w.cols; ++chunk) {
                I32 expanded[kChunkWords];
                expand_words(panel, chunk * kChunk, expanded);
                for (int k = 0; k < kChunkWords; ++k)
                    expanded[k].store(words + (chunk * kChunkWords + k) * kLanes);
            }
            run_rows(task, panel, ExpandedCodes{words}, scales, p * kPanel);
        } else if (w.format == Format::affine && w.bits == 4) {
            run_rows(task, panel, StoredCodes{&panel}, scales, p * kPanel);
        } else {
            run_rows(task, panel, StoredAny{&panel}, scales, p * kPanel);
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
