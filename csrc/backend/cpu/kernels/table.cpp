#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {

extern const Kernels kTable;
const Kernels kTable = {
    .name = LILY_ISA_NAME,
    .matrix_scratch_floats = matrix_scratch_floats,
    .quantize_row = quantize_row,
    .matrix_integer = matrix_integer,
    .matrix_float = matrix_float,
    .read_row = read_row,
    .rms_norm = rms_norm,
    .convolve = convolve,
    .normalize_heads = normalize_heads,
    .delta_rule = delta_rule,
    .rotary_append = rotary_append,
    .attention_scratch_floats = attention_scratch_floats,
    .attend_span = attend_span,
    .join_span = join_span,
    .finish_attention = finish_attention,
    .swiglu = swiglu,
    .add_scaled = add_scaled,
};

}  // namespace LILY_ISA
}  // namespace lily::cpu
