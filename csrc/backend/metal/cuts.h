// How a batch is cut into blocks of rows that are computed together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace lily::metal {

// Rows [first, first + rows) of a batch.
struct Cut {
    int64_t first, rows;
    bool many;  // by the kernels of many rows
};

// Rows of one sequence beyond kMostRows go through the kernels of many rows, if there are some, at most
// `block_rows` at a time; the others kMostRows at a time, several sequences together.
std::vector<Cut> cut(std::span<const Segment> segments, bool many_rows, int64_t block_rows);

}  // namespace lily::metal
