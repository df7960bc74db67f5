// The delta rule without any part of the gated norm, and that norm as a launch of its own, for comparison.
//
// The kernels of delta_rule.metal, their names, bindings and parameters: out = o; `norm`, z and `squares` are
// of no use then. Formulas: see there. gated_norm  per head  out = o / sqrt(mean(o^2) + eps) * norm *
// silu(z), out another buffer than o, z in the
//             projected row: q | k | v | z | b | a. project_add follows in place of project_add_heads.
// Launch: delta_rule as in delta_rule.metal; gated_norm (heads, rows) threadgroups of one simdgroup.
// Bound: reading and writing the state; gated_norm its rows.
#define LILY_RAW_OUTPUT
#include "delta_rule.metal"

struct GatedNormShape {
    uint heads;
    uint dim;     // of a head
    uint stride;  // of a projected row
    uint gates;   // elements before z in it
    float eps;
};

[[kernel]] void gated_norm(device const Activation* raw [[buffer(0)]],
                           device const Activation* projected [[buffer(1)]],
                           device const float* norm [[buffer(2)]], device Activation* out [[buffer(3)]],
                           constant GatedNormShape& shape [[buffer(4)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
    const uint first = (group.y * shape.heads + group.x) * shape.dim;
    device const Activation* z = projected + group.y * shape.stride + shape.gates + group.x * shape.dim;
    float squares = 0.0f;
    for (uint d = lane; d < shape.dim; d += 32u) {
        const float o = float(raw[first + d]);
        squares = fma(o, o, squares);
    }
    const float inverse = 1.0f / sqrt(simd_sum(squares) / float(shape.dim) + shape.eps);
    for (uint d = lane; d < shape.dim; d += 32u) {
        out[first + d] = Activation(float(raw[first + d]) * inverse * norm[d] * silu(float(z[d])));
    }
}
