#include "backend/metal/cuts.h"

#include <algorithm>

#include "backend/metal/choices.h"

namespace lily::metal {

std::vector<Cut> cut(std::span<const Segment> segments, bool many_rows, int64_t block_rows) {
    std::vector<Cut> result;
    bool open = false;  // the last cut takes more rows
    for (const Segment& s : segments) {
        int64_t first = s.first_row;
        int64_t left = s.rows;
        while (left > 0) {
            const bool many = left > kMostRows && many_rows;
            // No block is left with so few rows that other kernels would take them.
            int64_t rows = left <= block_rows ? left : left - block_rows <= kMostRows ? left / 2 : block_rows;
            if (!many) {
                if (!open) result.push_back({first, 0, false});
                rows = std::min(left, kMostRows - result.back().rows);
                result.back().rows += rows;
                open = result.back().rows < kMostRows;
            } else {
                result.push_back({first, rows, true});
                open = false;
            }
            first += rows;
            left -= rows;
        }
    }
    return result;
}

}  // namespace lily::metal
