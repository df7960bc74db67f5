// The tensors of a checkpoint by canonical name, as views of mapped files.
//
// Filled once by the loader, then read by the graph builder: `take_*` hands out a weight and marks it used;
// what was never taken is reported by unused(). Not thread-safe; the views stay valid as long as the store.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/mapped_file.h"
#include "weights/matrix.h"

namespace lily {

// Where a tensor's bytes lie.
struct TensorLocation {
    int file = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
    Dtype dtype = Dtype::f32;
    std::vector<int64_t> shape;
};

struct QuantizationRecord {
    Format format = Format::affine;
    int bits = 4;
    int group = 64;
};

class WeightStore {
  public:
    explicit WeightStore(const std::vector<std::string>& paths);
    WeightStore(const WeightStore&) = delete;
    WeightStore& operator=(const WeightStore&) = delete;

    void add(const std::string& name, const std::string& label, const TensorLocation& data);
    void add_quantized(const std::string& name, const std::string& label, const TensorLocation& codes,
                       const TensorLocation& scales, const std::optional<TensorLocation>& biases,
                       const QuantizationRecord& quantization);

    bool has(const std::string& name) const { return entries_.contains(name); }

    // A matrix of exactly this shape. CheckpointError names the tensor, its shape and the expected one.
    Matrix take_matrix(const std::string& name, int64_t rows, int64_t cols);
    // `count` stacked matrices [count, rows, cols], one view each.
    ExpertMatrices take_stack(const std::string& name, int64_t count, int64_t rows, int64_t cols);
    // Small unquantised tensors as fp32 copies, any shape with this many elements.
    std::vector<float> take_vector(const std::string& name, int64_t count);
    // A copy whose row i is row order[i] of the stored matrix; the store owns it.
    Matrix take_reordered(const std::string& name, int64_t rows, int64_t cols,
                          const std::vector<int64_t>& order);

    std::vector<std::string> unused() const;
    int64_t bytes() const { return bytes_; }

  private:
    struct Entry {
        std::string label;
        std::vector<int64_t> shape;  // logical, codes unpacked
        Matrix matrix;               // all leading dimensions folded into rows
        bool used = false;
    };

    const std::byte* locate(const std::string& label, const TensorLocation& location) const;
    Entry& take(const std::string& name);

    std::vector<MappedFile> files_;
    std::vector<Buffer<std::byte>> copies_;
    std::map<std::string, Entry> entries_;
    int64_t bytes_ = 0;
};

}  // namespace lily
