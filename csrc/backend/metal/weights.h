// Weights in the GPU's memory: planned operation by operation, then allocated and filled at once.
//
// Few large page-aligned buffers hold everything; matrices that are read together are stacked. Files are read
// in parallel through their mapping, once: MLX's shards aren't aligned for use in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "backend/metal/command.h"
#include "backend/metal/device.h"
#include "backend/ops.h"

namespace lily::metal {

// Where something lies in the buffers, known after Weights::load().
struct Placed {
    const DeviceBuffer* buffer = nullptr;
    size_t offset = 0;
    size_t bytes = 0;
    operator Range() const { return {*buffer, offset, bytes}; }
};

// Stacked rows of one format, as metal/common/few_rows.h reads them: codes, scales and biases.
struct DeviceMatrix {
    Placed codes, scales, biases;  // of bf16 weights scales and biases are those of nothing
    int bits = 0;                  // of a code; 16: bf16
    uint32_t group_shift = 0;      // log2 of the columns that share a scale
    uint32_t rows = 0, cols = 0;   // of one matrix of the stack
    uint64_t matrix_bytes = 0;     // of rows x cols
};

class Weights {
  public:
    // fp32 scales for all matrices if any has other than bf16 ones: kernels are compiled for one kind.
    explicit Weights(bool fp32_scales) : fp32_scales_(fp32_scales) {}

    // Matrices above each other. `rows` of the result are the sum of theirs. The same matrix alone twice (a
    // tied head) is held once. BackendError names a tensor whose format has no kernels. The result is filled
    // by load() and stays where it is.
    const DeviceMatrix* stack(std::span<const Matrix> matrices);
    // For each i the matrices parts[0][i], parts[1][i], ... above each other: experts.
    const DeviceMatrix* stack_experts(std::span<const ExpertMatrices* const> parts);
    const Placed* vector(std::span<const float> values);

    // Whether a stack of both is possible.
    static bool same_format(const Matrix& a, const Matrix& b);
    // Whether scales of this matrix make kernels with fp32 scales necessary.
    static bool needs_fp32_scales(const Matrix& matrix) {
        return matrix.format == Format::affine && matrix.dtype != Dtype::bf16;
    }

    // Allocates, after the budget was asked for everything, and reads. MemoryBudgetError says what is
    // missing.
    void load(Device& device);
    uint64_t bytes() const { return total_; }

  private:
    enum class Conversion : uint8_t { none, bf16_to_f32, f16_to_f32 };
    struct Copy {
        const std::byte* from;
        size_t bytes;  // read
        Conversion conversion;
        Placed* to;
        size_t offset;  // in `to`
    };

    DeviceMatrix& add(const Matrix& sample, int64_t rows);
    void copy(const Matrix& matrix, DeviceMatrix& to, int64_t first_row);
    Placed& place(size_t bytes);
    void fill() const;

    bool fp32_scales_;
    std::deque<DeviceMatrix> matrices_;
    std::deque<std::vector<float>> floats_;
    std::deque<Placed> vectors_;
    std::vector<std::pair<const std::byte*, const DeviceMatrix*>> single_;  // by their data
    std::vector<Placed*> pieces_;
    std::vector<Copy> copies_;
    std::deque<DeviceBuffer> buffers_;
    uint64_t total_ = 0;
};

}  // namespace lily::metal
