// Steps for blocks of more than kMostRows rows of one sequence: the kernels of docs/metal-prefill.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/metal/norm_rows.h"
#include "backend/metal/operand.h"
#include "backend/metal/step.h"

namespace lily::metal {

constexpr std::array<uint32_t, 4> kTiles = {8, 16, 32, 64};

// Of a dense product.
constexpr Tiling dense_tiling(MatrixPath path, uint32_t rows) {
    const uint32_t tile = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
    return tiling(path, std::max(tile, smallest_tile(path)));
}

// Of experts, from the mean rows of those that have any; the largest for all without `fitted`.
constexpr Tiling expert_tiling(MatrixPath path, uint64_t rows, uint64_t experts, uint64_t top_k,
                               bool fitted) {
    const uint64_t pairs = rows * top_k;
    const uint64_t busy = std::min(experts, pairs);
    const uint32_t tile = !fitted || pairs >= 64 * busy ? 64
                          : pairs < 4 * busy            ? 8
                          : pairs < 16 * busy           ? 16
                                                        : 32;
    return tiling(path, std::max(tile, smallest_tile(path)));
}

// Blocks of experts that are enough for any choice.
constexpr uint32_t block_capacity(uint64_t rows, uint64_t experts, uint64_t top_k, bool shared,
                                  uint32_t tile) {
    const uint64_t pairs = rows * top_k;
    return divided(pairs, tile) + static_cast<uint32_t>(std::min(experts, pairs)) +
           (shared ? divided(rows, tile) : 0);
}

// The structure of matrix_simdgroup.metal's dense kernels.
struct RowsShape {
    uint32_t rows, cols, outputs, out_stride, group_shift;
    float eps;
};

// Kernels of one name by path and rows of their tile, "<name>_t<rows>".
class TileKernels {
  public:
    TileKernels(Kernels& kernels, const std::string& name) {
        for (const MatrixPath path : {MatrixPath::simdgroup, MatrixPath::tensor_tiles}) {
            for (const uint32_t tile : kTiles) {
                kernels_.emplace_back(kernels, path_family(path), name + "_t" + std::to_string(tile));
            }
        }
    }
    // Both forms of tensor operations have the same names, of which one is compiled.
    const Kernel& operator()(MatrixPath path, const Tiling& tiling) const {
        const size_t tile = tiling.rows == 8 ? 0 : tiling.rows == 16 ? 1 : tiling.rows == 32 ? 2 : 3;
        return kernels_[(path == MatrixPath::simdgroup ? 0 : kTiles.size()) + tile]();
    }

  private:
    std::vector<OneKernel> kernels_;
};

// Whether there is a kernel; tensor operations come with bf16 activations.
bool has_tensor_attention(const AttentionShape& shape);

// Why attention of some rows by tensor operations isn't that by simdgroup matrices, or "": it relies on the
// same layout of registers as tensor fragments. `kv` is that of the model.
std::string attention_disagreement(const AttentionShape& shape, const KvLayout& kv, KernelSet& kernels,
                                   Device& device, CommandStream& stream, size_t activation_bytes);

// Null: the step of make_step takes any number of rows.
std::unique_ptr<Step> make_rows_step(const Embed& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const NormProject& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const DeltaRule& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const RotaryAppend& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const Attend& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const ProjectAdd& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const Route& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const ExpertsUp& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const ExpertsDown& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const NormGateUp& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const Head& op, Builder& builder);
std::unique_ptr<Step> make_rows_step(const CombineHidden& op, Builder& builder);

}  // namespace lily::metal
