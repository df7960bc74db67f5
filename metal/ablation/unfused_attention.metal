// The pieces of rotary_append, each a launch, for comparison: bindings and parameters of attention.metal's
// shape.
//
// norm_heads    per query and key head  x <- x / sqrt(mean(x^2) + eps) * norm, in place.
// rotate_heads  the rotation of the first 2 P dimensions of query and key heads, in place; tables of cos and
// sin
//               as in attention.metal.
// append        keys and values of a row to its page.
// Launch: norm_heads and rotate_heads (heads + kv_heads, rows) threadgroups of one simdgroup, append
// (kv_heads,
//         rows) of one simdgroup.
// Bound: reading and writing the rows, and a launch each.
#include "common/attention_shape.h"

// Where query head or key head `head` of a projected row begins.
inline uint head_start(constant AttentionShape& shape, uint head, uint dim) {
    return head < shape.heads ? head * 2u * dim : shape.heads * 2u * dim + (head - shape.heads) * dim;
}

template <int D>
[[kernel]] void norm_heads(device Activation* projected [[buffer(0)]],
                           device const float* q_norm [[buffer(1)]], device const float* k_norm [[buffer(2)]],
                           constant AttentionShape& shape [[buffer(3)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
    device Activation* x = projected + group.y * shape.stride + head_start(shape, group.x, uint(D));
    const bool is_query = group.x < shape.heads;
    float squares = 0.0f;
    for (uint d = lane; d < uint(D); d += 32u) squares = fma(float(x[d]), float(x[d]), squares);
    const float inverse = 1.0f / sqrt(simd_sum(squares) / float(D) + shape.eps);
    for (uint d = lane; d < uint(D); d += 32u) {
        x[d] = Activation(float(x[d]) * inverse * (is_query ? q_norm[d] : k_norm[d]));
    }
}

template <int D>
[[kernel]] void rotate_heads(device Activation* projected [[buffer(0)]],
                             device const float2* coarse [[buffer(1)]],
                             device const float2* fine [[buffer(2)]],
                             device const uint* positions [[buffer(3)]],
                             constant AttentionShape& shape [[buffer(4)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]]) {
    device Activation* x = projected + group.y * shape.stride + head_start(shape, group.x, uint(D));
    const uint position = positions[group.y];
    for (uint pair = lane; pair < shape.pairs; pair += 32u) {
        const float2 a = coarse[position / kFinePositions * shape.pairs + pair];
        const float2 b = fine[position % kFinePositions * shape.pairs + pair];
        const float cosine = fma(a.x, b.x, -(a.y * b.y));
        const float sine = fma(a.x, b.y, a.y * b.x);
        const float first = float(x[pair]);
        const float second = float(x[pair + shape.pairs]);
        x[pair] = Activation(fma(first, cosine, -(second * sine)));
        x[pair + shape.pairs] = Activation(fma(second, cosine, first * sine));
    }
}

template <typename Cached, int D>
[[kernel]] void append(device const Activation* projected [[buffer(0)]],
                       device const uint* positions [[buffer(1)]], device const uint* sequences [[buffer(2)]],
                       device const uint* pages [[buffer(3)]], device Cached* cache [[buffer(4)]],
                       constant AttentionShape& shape [[buffer(5)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group.y;
    const uint position = positions[row];
    const uint page = pages[sequences[row] * shape.table_stride + position / kPage];
    device const Activation* key =
        projected + row * shape.stride + head_start(shape, shape.heads + group.x, uint(D));
    device const Activation* value = key + shape.kv_heads * uint(D);
    device Cached* keys = cache + ulong(page) * ulong(shape.page_stride) + shape.layer_offset +
                          group.x * (2u * kPage * uint(D));
    device Cached* values = keys + kPage * uint(D) + position % kPage * uint(D);
    for (uint d = lane; d < uint(D); d += 32u) {
        keys[d * kPage + position % kPage] = Cached(float(key[d]));
        values[d] = Cached(float(value[d]));
    }
}

#define LILY_HEADS(dim)                                      \
    template [[host_name("norm_heads_d" #dim)]] [[kernel]]   \
    decltype(norm_heads<dim>) norm_heads<dim>;               \
    template [[host_name("rotate_heads_d" #dim)]] [[kernel]] \
    decltype(rotate_heads<dim>) rotate_heads<dim>;
#define LILY_APPEND(cached, dim)                                   \
    template [[host_name("append_" #cached "_d" #dim)]] [[kernel]] \
    decltype(append<cached, dim>) append<cached, dim>;

#ifdef LILY_HEAD_DIM
#define LILY_HEADS_OF(cached, dim) \
    LILY_HEADS(dim)                \
    LILY_APPEND(cached, dim)
LILY_HEADS_OF(LILY_CACHED, LILY_HEAD_DIM)
#else
LILY_HEADS(32)
LILY_HEADS(64)
LILY_HEADS(128)
LILY_HEADS(256)
LILY_APPEND(bfloat, 32)
LILY_APPEND(bfloat, 64)
LILY_APPEND(bfloat, 128)
LILY_APPEND(bfloat, 256)
LILY_APPEND(float, 64)
LILY_APPEND(float, 256)
#endif
