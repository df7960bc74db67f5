// A whole weight matrix expanded into device memory, for comparison: without weights that stay compressed
// until they are multiplied.
//
// expand_weights  out[n, k] = the weight, rounded to the activations' type: what a tile holds. The products
// of
//                 matrix_simdgroup.metal then take it as plain weights (format b16) and give the same bytes.
//                 Bindings: codes, scales, biases, out [rows, cols], {rows, cols, log2 group}.
//                 Launch: ceil(rows * cols / 8192) threadgroups of 256 threads, a chunk of 32 weights a
//                 thread.
// Bound: writing the matrix, 3.6 times the bytes of its 4-bit codes.
#include "common/weight_tiles.h"

struct ExpandShape {
    uint rows;
    uint cols;
    uint group_shift;
};

template <Format F>
[[kernel]] void expand_weights(device const uint* codes [[buffer(0)]],
                               device const Scale* scales [[buffer(1)]],
                               device const Scale* biases [[buffer(2)]], device Activation* out [[buffer(3)]],
                               constant ExpandShape& shape [[buffer(4)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint index [[thread_index_in_threadgroup]]) {
    threadgroup vec<Activation, 4> vectors[2048];
    const uint row_chunks = shape.cols / kChunk;
    const uint chunk = group.x * 256u + index;
    if (chunk >= shape.rows * row_chunks) return;
    threadgroup Activation* own = (threadgroup Activation*)(vectors + index * 8u);
    uint words[chunk_words(F)];
    float scales_bias[3];
    load_chunk<F>(codes, scales, biases, chunk / row_chunks, chunk % row_chunks * kChunk, shape.cols,
                  shape.group_shift, words, scales_bias);
    expand_chunk<F, Activation>(words, scales_bias, own);
    device vec<Activation, 4>* target = (device vec<Activation, 4>*)(out + ulong(chunk) * ulong(kChunk));
#pragma clang loop unroll(full)
    for (uint i = 0u; i < 8u; ++i) target[i] = vectors[index * 8u + i];
}

#define LILY_EXPAND(format)                                      \
    template [[host_name("expand_weights_" #format)]] [[kernel]] \
    decltype(expand_weights<Format::format>) expand_weights<Format::format>;
#define LILY_EXPAND_FORMAT(format) LILY_EXPAND(format)

LILY_EACH_FORMAT(LILY_EXPAND_FORMAT)
