// Parameters, tiles and merged splits of the attention of many rows, the same for both matrix units.
#pragma once
#include "common/numbers.h"

struct AttentionRowsShape {
    uint rows;
    uint heads;
    uint kv_heads;
    uint pack;          // query heads of a tile
    uint stride;        // of a projected row
    uint page_stride;   // elements per page, all layers
    uint layer_offset;  // elements before this layer in a page
    uint split_pages;   // pages of a split
    uint splits;        // threadgroups of a tile: one has all of its splits, several have one each
};

constant constexpr const uint kPage = 64u;
constant constexpr const uint kThreads = 128u;
constant constexpr const float kLog2e = 1.44269504088896341f;

// Eights of rows in a tile, so that queries stay within threadgroup memory.
template <int D>
constexpr int row_fragments() {
    return sizeof(Activation) == 4 && D == 256 ? 2 : 4;
}

// What a row has of a set of positions: sums of values by the weights 2^(score - top), the total of the
// weights, top. Splits are merged in ascending order by these two alone, in whichever kernel.

// `all`, (top, total), becomes that with the further positions of `next`; returns the factors of both sums.
inline float2 merge(thread float2& all, float2 next) {
    const float top = max(all.x, next.x);
    const float2 factors = float2(exp2(all.x - top), exp2(next.x - top));
    all = float2(top, fma(next.y, factors.y, all.y * factors.x));
    return factors;
}

inline float merged(float all, float next, float2 factors) { return fma(next, factors.y, all * factors.x); }
