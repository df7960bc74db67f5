// The kernels of one instruction set, as declared to the table that collects them.
#pragma once

#include "backend/cpu/kernels.h"

namespace lily::cpu {
namespace LILY_ISA {

int64_t matrix_scratch_floats(int64_t cols);
void matrix_integer(const MatrixTask& task);
void matrix_float(const MatrixTask& task);
void read_row(const Matrix& table, int64_t row, float* out);
void quantize_row(const float* x, int64_t cols, int16_t* integers, int8_t* digits, float* scales,
                  float* sums);
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out);
void swiglu(const float* gate, const float* up, int64_t count, float* out);
void add_scaled(const float* x, float scale, int64_t count, float* out);
void convolve(const DeltaRule& op, const float* projected, const float* history, int64_t rows, int64_t begin,
              int64_t end, float* mixed);
void normalize_heads(const DeltaRule& op, float* mixed_row);
void delta_rule(const DeltaTask& task);
void rotary_append(const RotaryAppend& op, float* projected_row, const float* angles, int64_t position,
                   KvCache& cache);
int64_t attention_scratch_floats(const AttentionShape& shape, int64_t rows);
void attend_span(const AttentionTask& task, int64_t span, float* partials, float* scratch);
void join_span(const AttentionTask& task, int64_t span, const float* partials, float* joined);
void finish_attention(const AttentionTask& task, const float* joined, float* out);

}  // namespace LILY_ISA
}  // namespace lily::cpu
