#include "weights/weight_store.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/numeric.h"

namespace lily {
namespace {

std::string describe(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

// The product of a shape, refusing what no file can hold.
int64_t elements(const std::string& label, const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) {
        if (extent <= 0)
            throw CheckpointError(label + " has an empty or negative dimension: " + describe(shape));
        if (count > std::numeric_limits<int64_t>::max() / 64 / extent) {
            throw CheckpointError(label + " has an impossible shape " + describe(shape));
        }
        count *= extent;
    }
    return count;
}

void require_bytes(const std::string& label, const TensorLocation& location) {
    const int64_t expected =
        elements(label, location.shape) * static_cast<int64_t>(dtype_bytes(location.dtype));
    if (expected != location.bytes) {
        throw CheckpointError(label + " has " + std::to_string(location.bytes) + " bytes, its shape " +
                              describe(location.shape) + " needs " + std::to_string(expected));
    }
}

float read_float(const std::byte* data, Dtype dtype, int64_t index) {
    if (dtype == Dtype::f32) {
        float value;
        std::memcpy(&value, data + index * 4, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, data + index * 2, 2);
    return dtype == Dtype::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

size_t physical_memory() {
    return static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

bool is_float(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16; }

}  // namespace

WeightStore::WeightStore(const std::vector<std::string>& paths) {
    files_.reserve(paths.size());
    size_t bytes = 0;
    for (const auto& path : paths) bytes += files_.emplace_back(path).bytes().size();
    if (bytes > physical_memory()) return;
    for (const MappedFile& file : files_) file.prefer_large_pages();
}

const std::byte* WeightStore::locate(const std::string& label, const TensorLocation& location) const {
    if (location.file < 0 || location.file >= static_cast<int>(files_.size())) {
        throw CheckpointError(label + " lies in file " + std::to_string(location.file) +
                              ", which does not exist");
    }
    const auto& file = files_[static_cast<size_t>(location.file)];
    const auto size = static_cast<int64_t>(file.bytes().size());
    if (location.offset < 0 || location.bytes < 0 || location.offset > size ||
        location.bytes > size - location.offset) {
        throw CheckpointError(label + " reaches beyond the end of " + file.path() +
                              ": the file is truncated");
    }
    require_bytes(label, location);
    return file.bytes().data() + location.offset;
}

void WeightStore::add(const std::string& name, const std::string& label, const TensorLocation& data) {
    if (!is_float(data.dtype)) throw CheckpointError(label + " is neither quantised nor a float tensor");
    if (data.shape.empty()) throw CheckpointError(label + " is a scalar, expected at least one dimension");
    Entry entry;
    entry.label = label;
    entry.shape = data.shape;
    entry.matrix.dtype = data.dtype;
    entry.matrix.cols = data.shape.back();
    entry.matrix.data = locate(label, data);
    entry.matrix.rows = elements(label, data.shape) / entry.matrix.cols;
    entry.matrix.label = label;
    bytes_ += data.bytes;
    if (!entries_.emplace(name, std::move(entry)).second)
        throw CheckpointError("two tensors are named " + name);
}

void WeightStore::add_quantized(const std::string& name, const std::string& label,
                                const TensorLocation& codes, const TensorLocation& scales,
                                const std::optional<TensorLocation>& biases,
                                const QuantizationRecord& quantization) {
    const auto& [format, bits, group] = quantization;
    if (codes.shape.size() < 2 || scales.shape.size() != codes.shape.size()) {
        throw CheckpointError(label + ": codes " + describe(codes.shape) + " and scales " +
                              describe(scales.shape) + " do not belong together");
    }
    if (codes.dtype != Dtype::u32) throw CheckpointError(label + ": quantised codes must be U32");
    if (bits < 2 || bits > 8 || bits == 7 || group < 16 || group > 128 || group % 16 != 0) {
        throw CheckpointError(label + ": unsupported quantisation, " + std::to_string(bits) +
                              " bits in groups of " + std::to_string(group));
    }
    Entry entry;
    entry.label = label;
    entry.shape = codes.shape;
    Matrix& matrix = entry.matrix;
    matrix.format = format;
    matrix.bits = bits;
    matrix.group = group;
    matrix.label = label;
    matrix.data = locate(label, codes);
    matrix.scales = locate(label, scales);
    matrix.dtype = scales.dtype;
    if (codes.shape.back() * 32 % bits != 0) {
        throw CheckpointError(label + ": " + std::to_string(codes.shape.back()) +
                              " words do not hold whole " + std::to_string(bits) + "-bit codes");
    }
    matrix.cols = codes.shape.back() * 32 / bits;
    matrix.rows = elements(label, codes.shape) / codes.shape.back();
    entry.shape.back() = matrix.cols;
    std::vector<int64_t> expected = entry.shape;
    expected.back() = matrix.cols / group;
    if (matrix.cols % group != 0 || scales.shape != expected) {
        throw CheckpointError(label + ": scales have shape " + describe(scales.shape) + ", expected " +
                              describe(expected) + " for " + std::to_string(bits) + " bits in groups of " +
                              std::to_string(group));
    }
    if (format == Format::affine) {
        if (!biases) throw CheckpointError(label + ": affine quantisation needs biases");
        if (biases->shape != scales.shape || biases->dtype != scales.dtype || !is_float(scales.dtype)) {
            throw CheckpointError(label +
                                  ": scales and biases must be float tensors of the same shape and dtype");
        }
        matrix.biases = locate(label, *biases);
        bytes_ += biases->bytes;
    } else if (dtype_bytes(scales.dtype) != 1) {
        throw CheckpointError(label + ": scales of this mode must be one byte each");
    }
    bytes_ += codes.bytes + scales.bytes;
    if (!entries_.emplace(name, std::move(entry)).second)
        throw CheckpointError("two tensors are named " + name);
}

WeightStore::Entry& WeightStore::take(const std::string& name) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
        throw CheckpointError("the checkpoint has no tensor for " + name +
                              "; it is incomplete or of another architecture");
    }
    found->second.used = true;
    return found->second;
}

Matrix WeightStore::take_matrix(const std::string& name, int64_t rows, int64_t cols) {
    const Entry& entry = take(name);
    if (entry.matrix.rows != rows || entry.matrix.cols != cols) {
        throw CheckpointError(entry.label + " has shape " + describe(entry.shape) + ", expected " +
                              describe({rows, cols}));
    }
    return entry.matrix;
}

ExpertMatrices WeightStore::take_stack(const std::string& name, int64_t count, int64_t rows, int64_t cols) {
    const Entry& entry = take(name);
    const std::vector<int64_t> expected = {count, rows, cols};
    if (entry.shape != expected) {
        throw CheckpointError(entry.label + " has shape " + describe(entry.shape) + ", expected " +
                              describe(expected));
    }
    ExpertMatrices stack;
    stack.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) stack.push_back(entry.matrix.rows_from(i * rows, rows));
    return stack;
}

std::vector<float> WeightStore::take_vector(const std::string& name, int64_t count) {
    const Entry& entry = take(name);
    const Matrix& matrix = entry.matrix;
    if (matrix.quantized() || matrix.rows * matrix.cols != count) {
        throw CheckpointError(entry.label + " has shape " + describe(entry.shape) + ", expected " +
                              std::to_string(count) + " unquantised numbers");
    }
    std::vector<float> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        values[static_cast<size_t>(i)] = read_float(matrix.data, matrix.dtype, i);
        if (!std::isfinite(values[static_cast<size_t>(i)])) {
            throw CheckpointError(entry.label + " contains a value that is not finite at index " +
                                  std::to_string(i));
        }
    }
    return values;
}

Matrix WeightStore::take_reordered(const std::string& name, int64_t rows, int64_t cols,
                                   const std::vector<int64_t>& order) {
    const Matrix stored = take_matrix(name, rows, cols);
    Matrix result = stored;
    result.rows = static_cast<int64_t>(order.size());
    const auto gather = [&](const std::byte* from, int64_t width) -> const std::byte* {
        if (!from || width == 0) return nullptr;
        Buffer<std::byte>& copy = copies_.emplace_back(order.size() * static_cast<size_t>(width));
        for (size_t i = 0; i < order.size(); ++i) {
            std::memcpy(copy.data() + i * static_cast<size_t>(width), from + order[i] * width,
                        static_cast<size_t>(width));
        }
        return copy.data();
    };
    result.data = gather(stored.data, stored.row_bytes());
    result.scales = gather(stored.scales, stored.scale_row_bytes());
    result.biases = gather(stored.biases, stored.scale_row_bytes());
    return result;
}

std::vector<std::string> WeightStore::unused() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) {
        if (!entry.used) names.push_back(entry.label);
    }
    return names;
}

}  // namespace lily
