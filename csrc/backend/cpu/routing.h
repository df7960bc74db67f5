// Which rows each expert serves: the (row, slot) pairs of a batch sorted by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/ops.h"

namespace lily::cpu {

// A row's routing, as Route writes it: top_k weights, top_k expert numbers (exact in fp32), the shared gate.
class RoutingRow {
  public:
    RoutingRow(const float* row, int64_t top_k) : row_(row), top_k_(top_k) {}
    float weight(int64_t slot) const { return slot < top_k_ ? row_[slot] : row_[2 * top_k_]; }
    int64_t expert(int64_t slot) const { return static_cast<int64_t>(row_[top_k_ + slot]); }

  private:
    const float* row_;
    int64_t top_k_;
};

// Chooses the top_k largest logits (the lower number first among equals) and writes a routing row.
void route_row(const ExpertShape& shape, const float* logits, float* routing);

struct ExpertLoad {
    int64_t expert;        // shape.experts stands for the shared expert
    const int32_t* pairs;  // row * slots + slot, ascending rows
    int64_t count;
};

// Counting sort of a batch's pairs; with `together` off, each pair is a load of its own.
class ExpertGroups {
  public:
    void build(const ExpertShape& shape, const float* routing, int64_t stride, int64_t rows, bool together);
    const std::vector<ExpertLoad>& loads() const { return loads_; }

  private:
    std::vector<int32_t> counts_;
    std::vector<int32_t> pairs_;
    std::vector<ExpertLoad> loads_;
};

}  // namespace lily::cpu
