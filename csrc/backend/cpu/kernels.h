// The kernels of the CPU backend, as a table of functions: one table per instruction set, chosen at run time.
//
// All tables give the same bits. A kernel works on one piece of one operation and touches no shared state but
// its outputs; the backend cuts operations into pieces and hands them to threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "backend/ops.h"
#include "state/kv_cache.h"

namespace lily::cpu {

constexpr int64_t kBlock = 64;       // columns that share an activation scale
constexpr int64_t kPanel = 16;       // output rows a matrix kernel works on at once
constexpr int64_t kMaxPanels = 2;    // panels per call for many rows
constexpr int64_t kMaxByteRows = 2;  // batches up to this size are also kept as bytes

// Rows of activations, in fp32 and, for integer dot products, as 16-bit integers with a scale per block:
// x ~ scale * integer. Within each run of eight columns the integers stand in the order 0 4 1 5 2 6 3 7, so
// that a 32-bit word meets the words of unpacked 4-bit codes. `digits` are the same integers as 256 high +
// low in signed bytes, for one or two rows: per 128 columns the even columns' high and low bytes, then the
// odd ones'.
struct RowsView {
    const float* values = nullptr;      // [rows, cols], row stride `cols`
    const int16_t* integers = nullptr;  // [rows, padded], padded = cols rounded up to kBlock
    const int8_t* digits = nullptr;     // [rows, digit_stride], null unless made
    const float* scales = nullptr;      // [rows, padded / kBlock]
    const float* sums = nullptr;        // [rows, sum_floats]: of scale * integer over 16, 32 and 64 columns
    int64_t cols = 0;
    int64_t padded() const { return (cols + kBlock - 1) / kBlock * kBlock; }
    int64_t blocks() const { return padded() / kBlock; }
    int64_t digit_stride() const { return (blocks() + 1) / 2 * 4 * kBlock; }
    int64_t sum_floats() const { return blocks() * 7; }
    // The sums over `width` (16, 32 or 64) columns of one row.
    const float* sums_of(int64_t row, int64_t width) const {
        const int64_t skip = width == 16 ? 0 : width == 32 ? 4 : 6;
        return sums + row * sum_floats() + blocks() * skip;
    }
};

// Where a panel lies; without a weight, nowhere.
struct PanelPlace {
    const Matrix* weight = nullptr;
    int64_t row = 0;
};

// out[i][0 .. panel) = W[first_row .. first_row + panel) x[row_index[i]], i < count. The bits of a result
// depend on its weight row and its activation row only.
struct MatrixTask {
    const Matrix* weight;
    int64_t first_row;
    int64_t panels;  // of kPanel output rows, 1 .. kMaxPanels
    const RowsView* x;
    const int32_t* row_index;  // null: rows 0 .. count - 1
    int64_t count;
    float* out;  // row i at out + i * out_stride
    int64_t out_stride;
    float* scratch;        // matrix_scratch_floats(cols) floats
    bool prefetch = true;  // ask for the next panel while one is read
    bool expand = true;    // for many rows, expand panels once into cache
    PanelPlace after;      // what this thread reads after the task
};

struct DeltaTask {
    const DeltaRule* op;
    int64_t head;            // value head
    const float* mixed;      // [rows, channels] after convolution and SiLU, q and k of unit length
    const float* projected;  // [rows, projected]
    int64_t rows;
    float* state;    // [key_dim, value_dim] of this head
    float* out;      // [rows, values]
    float* scratch;  // delta_scratch_floats(shape) floats
    // Else the state is read, not changed; only with Tape::kMostRows rows or less.
    bool advance = true;
};

inline int64_t delta_scratch_floats(const DeltaShape& shape) { return shape.key_dim * 64; }

constexpr int64_t kSpanTokens = 1024;  // keys whose softmax starts afresh

// Some rows and the query heads of one KV head. Partial results of a row and head: attention_floats(shape)
// floats, which hold the weighted sum of the values, the largest score and the sum of the weights.
struct AttentionTask {
    const AttentionShape* shape;
    const KvCache* cache;
    int64_t layer;
    int64_t kv_head;
    int64_t first_row;
    const float* projected;  // of row 0, as are outputs
    int64_t rows;
    int64_t position;  // of first_row
    bool prefetch;     // ask for the next page while one is read
    int64_t group() const { return shape->heads / shape->kv_heads; }
    int64_t visible(int64_t row) const { return position + row + 1; }  // keys that its row `row` attends to
    int64_t spans() const { return (visible(rows - 1) + kSpanTokens - 1) / kSpanTokens; }
};

struct Kernels {
    const char* name;
    int64_t (*matrix_scratch_floats)(int64_t cols);
    // `digits` may be null.
    void (*quantize_row)(const float* x, int64_t cols, int16_t* integers, int8_t* digits, float* scales,
                         float* sums);
    void (*matrix_integer)(const MatrixTask& task);  // quantised weights, integer dot products
    void (*matrix_float)(const MatrixTask& task);    // any weights, expanded to fp32
    void (*read_row)(const Matrix& table, int64_t row, float* out);  // one weight row as fp32
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
    // Convolution over channels [begin, end), all rows; `history` [taps, channels] is read, not changed.
    void (*convolve)(const DeltaRule& op, const float* projected, const float* history, int64_t rows,
                     int64_t begin, int64_t end, float* mixed);
    void (*normalize_heads)(const DeltaRule& op, float* mixed_row);
    void (*delta_rule)(const DeltaTask& task);
    // Cosines, then sines of the row's position, rotary_dim / 2 each.
    void (*rotary_append)(const RotaryAppend& op, float* projected_row, const float* angles, int64_t position,
                          KvCache& cache);
    int64_t (*attention_scratch_floats)(const AttentionShape& shape, int64_t rows);
    // partials [rows, group, attention_floats] of the keys in span `span`; rows that see none are left alone.
    void (*attend_span)(const AttentionTask& task, int64_t span, float* partials, float* scratch);
    // The same joined to those of the spans before; span 0 begins.
    void (*join_span)(const AttentionTask& task, int64_t span, const float* partials, float* joined);
    // Joined partials divided and gated, to the task's rows of out.
    void (*finish_attention)(const AttentionTask& task, const float* joined, float* out);
    void (*swiglu)(const float* gate, const float* up, int64_t count, float* out);
    void (*add_scaled)(const float* x, float scale, int64_t count, float* out);  // out = fma(x, scale, out)
};

inline int64_t attention_floats(const AttentionShape& shape) { return shape.head_dim + 16; }

// The best table this machine can run; `name` forces one ("avx512vnni", "avxvnni", "avx2", "neon",
// "generic"); null if it can't.
const Kernels* find_kernels(const std::string& name);

}  // namespace lily::cpu
