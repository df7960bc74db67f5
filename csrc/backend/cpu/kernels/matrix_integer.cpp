// W x for quantised W by integer dot products on the stored codes.
//
// For one output and one block of columns (the scale group, at most 64 columns):
//   acc = fma(float(sum of code * integer), scale * x_scale, acc);  acc = fma(bias, sum of x over the block,
//   acc)
// with blocks in ascending order. The integer sum is exact, so neither the number of rows, nor the panel, nor
// the instruction set changes a bit. One or two rows take the codes as bytes; few rows expand them in
// registers; many rows expand panels once into cache and walk them in tiles of rows. Bound by memory
// bandwidth for few rows, by the dot-product unit for many.
#include <bit>

#include "backend/cpu/kernels/expand.h"
#include "backend/cpu/kernels/matrix_bytes.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

constexpr int kTileRows = 8;  // rows per pass over a panel

// Chunks straight from memory.
struct StoredCodes {
    const Panel* panel;
    const PanelAhead* ahead;
    void load(int64_t chunk, I32* out) const {
        ahead->step(chunk);
        expand_codes<4>(*panel, chunk * kChunk, out);
    }
};

struct StoredAny {
    const Panel* panel;
    const PanelAhead* ahead;
    void load(int64_t chunk, I32* out) const {
        ahead->step(chunk);
        expand_words(*panel, chunk * kChunk, out);
    }
};

// Chunks that were expanded before.
struct ExpandedCodes {
    const int32_t* words;
    void load(int64_t chunk, I32* out) const {
        const int32_t* at = words + chunk * kChunkWords * kLanes;
#pragma GCC unroll 16
        for (int k = 0; k < kChunkWords; ++k) out[k] = I32::load(at + k * kLanes);
    }
};

template <typename Source>
struct PanelInput {
    Source source;
    const float* scales;
    const float* biases;  // null without
};

inline I32 word_at(const int16_t* integers, int64_t word) {
    int32_t value;
    std::memcpy(&value, integers + 2 * word, 4);
    return I32::set(value);
}

// M rows against P panels. Block: columns per scale, 16, 32 or 64; `group` columns share a scale in memory.
template <int M, int P, int Block, typename Source>
void accumulate(const PanelInput<Source>* panels, int64_t group, const RowsView& x, const int64_t* rows,
                F32 (*acc)[kTileRows]) {
    constexpr int kSplit = M * P >= 4 ? 1 : M * P >= 2 ? 2 : 4;  // independent sums hide the latency
    const int shift = std::countr_zero(static_cast<uint64_t>(group));
    const int64_t blocks = x.blocks();
    const int16_t* integers[M];
    const float* x_scales[M];
    const float* x_sums[M];
    for (int m = 0; m < M; ++m) {
        integers[m] = x.integers + rows[m] * x.padded();
        x_scales[m] = x.scales + rows[m] * blocks;
        x_sums[m] = x.sums_of(rows[m], Block);
        for (int p = 0; p < P; ++p) acc[p][m] = F32::zero();
    }
    I32 sums[P][M][kSplit];
    const auto clear = [&]() __attribute__((always_inline)) {
        for (int p = 0; p < P; ++p) {
            for (int m = 0; m < M; ++m) {
                for (int s = 0; s < kSplit; ++s) sums[p][m][s] = I32::zero();
            }
        }
    };
    const auto flush = [&](int64_t column) __attribute__((always_inline)) {
        const int64_t at = (column >> shift) * kLanes;
        for (int p = 0; p < P; ++p) {
            const F32 scale = F32::load(panels[p].scales + at);
            for (int m = 0; m < M; ++m) {
                I32 total = sums[p][m][0];
                for (int s = 1; s < kSplit; ++s) total = total + sums[p][m][s];
                acc[p][m] = fma(to_float(total), scale * F32::set(x_scales[m][column / kBlock]), acc[p][m]);
            }
            if (panels[p].biases) {
                const F32 bias = F32::load(panels[p].biases + at);
                for (int m = 0; m < M; ++m) {
                    acc[p][m] = fma(bias, F32::set(x_sums[m][column / Block]), acc[p][m]);
                }
            }
        }
        clear();
    };
    clear();
    const int64_t chunks = x.cols / kChunk;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if constexpr (P == 1) {
            I32 words[kChunkWords];
            panels[0].source.load(chunk, words);
#pragma GCC unroll 16
            for (int k = 0; k < kChunkWords; ++k) {
                for (int m = 0; m < M; ++m) {
                    I32& sum = sums[0][m][k % kSplit];
                    sum = dot_pairs(sum, words[k], word_at(integers[m], chunk * kChunkWords + k));
                }
                if (Block == 16 && k == 7) flush(chunk * kChunk);
            }
        } else {
            const int32_t* at[P];
            for (int p = 0; p < P; ++p) at[p] = panels[p].source.words + chunk * kChunkWords * kLanes;
#pragma GCC unroll 4
            for (int k = 0; k < kChunkWords; ++k) {
                I32 word[P];
                for (int p = 0; p < P; ++p) word[p] = I32::load(at[p] + k * kLanes);
                for (int m = 0; m < M; ++m) {
                    const I32 value = word_at(integers[m], chunk * kChunkWords + k);
                    for (int p = 0; p < P; ++p) sums[p][m][0] = dot_pairs(sums[p][m][0], word[p], value);
                }
                if (Block == 16 && k == 7) flush(chunk * kChunk);
            }
        }
        const int64_t end = (chunk + 1) * kChunk;
        if (Block == 16) flush(end - 16);
        if (Block == 32 || (Block == 64 && (end % 64 == 0 || chunk + 1 == chunks))) flush(end - kChunk);
    }
}

// Any number of rows up to a tile, by the smallest M that holds them; surplus rows repeat the last one.
template <int P, int Block, typename Source>
void accumulate_rows(int64_t count, const PanelInput<Source>* panels, int64_t group, const RowsView& x,
                     int64_t* rows, F32 (*acc)[kTileRows]) {
    for (int64_t i = count; i < kTileRows; ++i) rows[i] = rows[count - 1];
    if (count == 1) return accumulate<1, P, Block>(panels, group, x, rows, acc);
    if constexpr (Block == 64) {
        if (count == 2) return accumulate<2, P, Block>(panels, group, x, rows, acc);
        if (count == 3) return accumulate<3, P, Block>(panels, group, x, rows, acc);
        if (count == 4) return accumulate<4, P, Block>(panels, group, x, rows, acc);
        if (count == 5) return accumulate<5, P, Block>(panels, group, x, rows, acc);
        if (count == 6) return accumulate<6, P, Block>(panels, group, x, rows, acc);
        if (count == 7) return accumulate<7, P, Block>(panels, group, x, rows, acc);
    }
    accumulate<kTileRows, P, Block>(panels, group, x, rows, acc);
}

template <int P, typename Source>
void run_rows(const MatrixTask& task, const Panel* places, const PanelInput<Source>* panels, float* out) {
    const int64_t group = task.weight->group;
    // Tiles of nearly equal size: a small one at the end would wait for its own sums.
    const int64_t tiles = (task.count + kTileRows - 1) / kTileRows;
    int64_t count = 0;
    for (int64_t begin = 0, tile = 0; tile < tiles; ++tile, begin += count) {
        count = (task.count - begin) / (tiles - tile);
        int64_t rows[kTileRows];
        for (int64_t i = 0; i < count; ++i) rows[i] = task.row_index ? task.row_index[begin + i] : begin + i;
        F32 acc[P][kTileRows];
        if (group >= 64) {
            accumulate_rows<P, 64>(count, panels, group, *task.x, rows, acc);
        } else if (group == 32) {
            accumulate_rows<P, 32>(count, panels, group, *task.x, rows, acc);
        } else {
            accumulate_rows<P, 16>(count, panels, group, *task.x, rows, acc);
        }
        for (int64_t i = 0; i < count; ++i) {
            for (int p = 0; p < P; ++p)
                places[p].store(acc[p][i], out + (begin + i) * task.out_stride + p * kPanel);
        }
    }
}

// Scratch of one panel: scales and biases (a group has at least 16 columns), expanded codes, padding.
struct PanelScratch {
    float* scales;
    int32_t* words;
    std::byte* padding;
    PanelScratch(float* base, int64_t cols)
        : scales(base),
          words(reinterpret_cast<int32_t*>(base + 2 * cols)),
          padding(reinterpret_cast<std::byte*>(base + 2 * cols + cols * kLanes)) {}
    static int64_t floats(int64_t cols) { return 2 * cols + cols * kLanes + panel_padding_bytes(cols) / 4; }
};

template <typename Source>
PanelInput<Source> load_scales(const Panel& panel, float* scales, Source source) {
    load_group_floats(panel, panel.scales, scales);
    if (!panel.biases) return {source, scales, nullptr};
    float* biases = scales + panel.weight->cols / panel.weight->group * kLanes;
    load_group_floats(panel, panel.biases, biases);
    return {source, scales, biases};
}

PanelInput<ExpandedCodes> expand_panel(const Panel& panel, const PanelScratch& scratch, PanelAhead ahead) {
    const Matrix& w = *panel.weight;
    for (int64_t chunk = 0; chunk * kChunk < w.cols; ++chunk) {
        I32 words[kChunkWords];
        ahead.step(chunk);
        expand_words(panel, chunk * kChunk, words);
        for (int k = 0; k < kChunkWords; ++k)
            words[k].store(scratch.words + (chunk * kChunkWords + k) * kLanes);
    }
    return load_scales(panel, scratch.scales, ExpandedCodes{scratch.words});
}

template <int P>
void run_expanded(const MatrixTask& task, int64_t first_panel) {
    const Matrix& w = *task.weight;
    const auto place = [&](int64_t p) {
        const PanelScratch scratch(task.scratch + p * PanelScratch::floats(w.cols), w.cols);
        return Panel(w, task.first_row + (first_panel + p) * kPanel, scratch.padding);
    };
    const auto input = [&](const Panel& panel, int64_t p) {
        return expand_panel(panel, PanelScratch(task.scratch + p * PanelScratch::floats(w.cols), w.cols),
                            PanelAhead(task, first_panel + p, w.cols / kChunk));
    };
    float* out = task.out + first_panel * kPanel;
    if constexpr (P == 2) {
        const Panel places[] = {place(0), place(1)};
        const PanelInput<ExpandedCodes> panels[] = {input(places[0], 0), input(places[1], 1)};
        run_rows<2>(task, places, panels, out);
    } else {
        const Panel places[] = {place(0)};
        const PanelInput<ExpandedCodes> panels[] = {input(places[0], 0)};
        run_rows<1>(task, places, panels, out);
    }
}

// Columns read between two steps of fetching ahead, when few rows are multiplied.
int64_t step_columns([[maybe_unused]] const Matrix& w, [[maybe_unused]] const RowsView& x) {
#if defined(LILY_BYTE_DOTS)
    if (fits_bytes(w, x)) return kByteColumns;
#endif
    return kChunk;
}

}  // namespace

int64_t matrix_scratch_floats(int64_t cols) { return kMaxPanels * PanelScratch::floats(cols); }

void matrix_integer(const MatrixTask& task) {
    const Matrix& w = *task.weight;
    if (task.count > kTileRows && task.expand) {
        int64_t p = 0;
        for (; p + 2 <= task.panels; p += 2) run_expanded<2>(task, p);
        if (p < task.panels) run_expanded<1>(task, p);
        return;
    }
    const PanelScratch scratch(task.scratch, w.cols);
    for (int64_t p = 0; p < task.panels; ++p) {
        const Panel panel(w, task.first_row + p * kPanel, scratch.padding);
        float* out = task.out + p * kPanel;
        const PanelAhead ahead(task, p, w.cols / step_columns(w, *task.x));
#if defined(LILY_BYTE_DOTS)
        if (fits_bytes(w, *task.x)) {
            const auto input = load_scales(panel, scratch.scales, 0);
            for (int64_t i = 0; i < task.count; ++i) {
                const int64_t row = task.row_index ? task.row_index[i] : i;
                panel.store(multiply_bytes(panel, input.scales, input.biases, *task.x, row, ahead),
                            out + i * task.out_stride);
            }
            continue;
        }
#endif
        if (w.format == Format::affine && w.bits == 4) {
            const auto input = load_scales(panel, scratch.scales, StoredCodes{&panel, &ahead});
            run_rows<1>(task, &panel, &input, out);
        } else {
            const auto input = load_scales(panel, scratch.scales, StoredAny{&panel, &ahead});
            run_rows<1>(task, &panel, &input, out);
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
