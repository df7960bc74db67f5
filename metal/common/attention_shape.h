// Parameters of the attention kernels of a decode step, and the sizes of their cache and tables.
#pragma once
#include "common/numbers.h"

constant constexpr const uint kPage = 64u;
constant constexpr const uint kFinePositions = 512u;

struct AttentionShape {
    uint heads;
    uint kv_heads;
    uint pairs;         // P: rotated pairs
    uint stride;        // of a projected row
    uint table_stride;  // pages per table
    uint page_stride;   // elements per page, all layers
    uint layer_offset;  // elements before this layer in a page
    uint splits;        // capacity of the partial results
    uint medium_from;   // lengths from which splits are of 4 and of 16 pages
    uint long_from;
    float eps;
};
