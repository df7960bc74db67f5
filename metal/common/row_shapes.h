// Parameters of the products of weight matrices with many rows, the same for every matrix path.
#pragma once
#include "common/numbers.h"

struct RowsShape {
    uint rows;
    uint cols;        // K
    uint outputs;     // N
    uint out_stride;  // of `out`, in elements
    uint group_shift;
    float eps;
};

struct ExpertRowsShape {
    uint experts;  // the shared expert has this number
    uint top_k;
    uint slots;  // top_k, and one if there is a shared expert
    uint width;  // of a routed expert
    uint shared_width;
    uint stride;  // max(width, shared_width): of an entry's activation
    uint hidden;
    uint group_shift;
    uint shared_group_shift;
    uint part;  // blocks to take: 0 all, 1 of routed experts, 2 of the shared one
};

inline bool takes_block(uint4 block, constant ExpertRowsShape& shape) {
    const bool is_shared = block.x == shape.experts;
    return block.z > 0u && (shape.part == 0u || (shape.part == 2u) == is_shared);
}
