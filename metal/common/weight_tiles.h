// A chunk of 32 weights of one row, from the checkpoint's format to a tile in threadgroup memory.
//
// A thread keeps the next chunk in registers while the tile of the one before is multiplied. The expanded
// weight is scale q + bias by one fma, rounded once to the tile's type.
#pragma once
#include "common/codes.h"

// Words, scales and bias of columns [column, column + 32) of a row; zero beyond `cols`.
// words[chunk_words(F)], scales_bias[3].
template <Format F>
inline void load_chunk(device const uint* codes, device const Scale* scales, device const Scale* biases,
                       uint row, uint column, uint cols, uint group_shift, thread uint* words,
                       thread float* scales_bias) {
    constexpr int kScales = chunk_scales(F);
    if (column < cols) {
        device const uint* source = codes + (row * (cols / kChunk) + column / kChunk) * chunk_words(F);
        const uint group = row * (cols >> group_shift) + (column >> group_shift);
#pragma clang loop unroll(full)
        for (int p = 0; p < chunk_pieces(F); ++p) load_piece<F>(source, p, words + p * piece_words(F));
#pragma clang loop unroll(full)
        for (int s = 0; s < kScales; ++s) scales_bias[s] = scale_value<F>(scales[group + uint(s)]);
        if (is_affine(F)) scales_bias[2] = float(biases[group]);
    } else {
#pragma clang loop unroll(full)
        for (int i = 0; i < int(chunk_words(F)); ++i) words[i] = 0u;
#pragma clang loop unroll(full)
        for (int i = 0; i < 3; ++i) scales_bias[i] = 0.0f;
    }
}

template <Format F, typename Tile>
inline void expand_chunk(thread const uint* words, thread const float* scales_bias, threadgroup Tile* out) {
    constexpr int kSteps = piece_steps(F);
    const float4 place =
        float4(code_weight<F>(0u), code_weight<F>(1u), code_weight<F>(2u), code_weight<F>(3u));
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; ++i) {
        float4 w = decode<F>(words + i / kSteps * piece_words(F), i % kSteps);
        if (chunk_scales(F) > 0) {
            const float4 scale = place * scales_bias[chunk_scales(F) == 2 ? i / 4 : 0];
            const float bias = is_affine(F) ? scales_bias[2] : 0.0f;
            w = float4(fma(scale.x, w.x, bias), fma(scale.y, w.y, bias), fma(scale.z, w.z, bias),
                       fma(scale.w, w.w, bias));
        }
        ((threadgroup vec<Tile, 4>*)out)[i] = vec<Tile, 4>(Tile(w.x), Tile(w.y), Tile(w.z), Tile(w.w));
    }
}
