// Parameters and tiles of the attention of many rows, the same for both matrix units.
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
    uint splits;        // 1: out is written, else partial and statistics
};

constant constexpr const uint kPage = 64u;
constant constexpr const uint kThreads = 128u;
constant constexpr const float kLog2e = 1.44269504088896341f;

// Eights of rows in a tile, so that queries stay within threadgroup memory.
template <int D>
constexpr int row_fragments() {
    return sizeof(Activation) == 4 && D == 256 ? 2 : 4;
}
