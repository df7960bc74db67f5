// Weights in the GPU's memory: planned operation by operation, then allocated and filled at once.
//
// Few large page-aligned buffers hold everything; matrices that are read together are stacked. Files are read
// in parallel through their mapping, once: MLX's shards aren't aligned for use in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
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

// How numbers are written, as macros and names of metal/common/codes.h say it: "b4" with scales "bfloat".
struct NumberFormat {
    std::string name;
    std::string scale;
    auto operator<=>(const NumberFormat&) const = default;
};

// BackendError names a tensor whose format has no kernels.
NumberFormat number_format(const Matrix& matrix);

// Stacked rows of one format, as metal/common/few_rows.h reads them: codes, scales and biases.
struct DeviceMatrix {
    Placed codes, scales, biases;  // those that the format doesn't have are of no bytes
    NumberFormat format;
    uint32_t group_shift = 0;     // log2 of the columns that share a scale
    uint32_t rows = 0, cols = 0;  // of one matrix of the stack
    uint64_t matrix_bytes = 0;    // of rows x cols
};

class Weights {
  public:
    // Matrices above each other. `rows` of the result are the sum of theirs. The same stack twice is held
    // once. BackendError names a tensor whose format has no kernels. The result is filled
    // by load() and stays where it is.
    const DeviceMatrix* stack(std::span<const Matrix> matrices);
    // For each i the matrices parts[0][i], parts[1][i], ... above each other: experts.
    const DeviceMatrix* stack_experts(std::span<const ExpertMatrices* const> parts);
    // Neighbours of one format in a stack, in order.
    std::vector<const DeviceMatrix*> stack_by_format(std::span<const Matrix> matrices);
    // Lists one after the other in a stack; null if they are empty.
    const DeviceMatrix* stack_lists(std::initializer_list<const std::vector<Matrix>*> lists);
    const Placed* vector(std::span<const float> values);

    // Whether a stack of both is possible.
    static bool same_format(const Matrix& a, const Matrix& b);

    // When all is planned: settles where everything will lie, and returns the bytes it takes of the GPU's
    // memory.
    uint64_t lay_out(const Device& device);
    // Allocates, after the budget was asked for everything, and reads. MemoryBudgetError says what is
    // missing. After lay_out().
    void load(Device& device);
    uint64_t bytes() const { return total_; }

  private:
    struct Copy {
        const std::byte* from;
        size_t bytes;
        Placed* to;
        size_t offset;  // in `to`
    };

    DeviceMatrix& add(const Matrix& sample, int64_t rows);
    void copy(const Matrix& matrix, DeviceMatrix& to, int64_t first_row);
    Placed& place(size_t bytes);
    void fill() const;

    std::deque<DeviceMatrix> matrices_;
    std::deque<std::vector<float>> floats_;
    std::deque<Placed> vectors_;
    std::map<std::vector<const std::byte*>, const DeviceMatrix*> stacks_;  // by their data
    std::vector<Placed*> pieces_;
    std::vector<Copy> copies_;
    std::vector<size_t> sizes_;      // of the buffers
    std::vector<size_t> buffer_of_;  // of the pieces
    std::deque<DeviceBuffer> buffers_;
    uint64_t total_ = 0;
};

}  // namespace lily::metal
