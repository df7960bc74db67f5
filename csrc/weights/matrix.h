// Views of weights in mapped memory. Nothing here owns data; a WeightStore does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lily {

enum class Dtype : uint8_t { f32, f16, bf16, u32, u8, f8_e4m3 };

size_t dtype_bytes(Dtype dtype);
Dtype parse_dtype(const std::string& name);  // safetensors names; CheckpointError when unknown

// How the numbers of a matrix are written.
//   plain:  one float per element
//   affine: w = scale * code + bias per group of `group` columns, unsigned codes of `bits` bits
//   mxfp4:  w = 2^(s-127) * e2m1(code), group 32;   nvfp4: w = e4m3(s) * e2m1(code), group 16
//   mxfp8:  w = 2^(s-127) * e4m3(code), group 32
enum class Format : uint8_t { plain, affine, mxfp4, mxfp8, nvfp4 };

// A [rows, cols] matrix, row-major; `stride` in bytes between rows of codes (or of floats).
struct Matrix {
    Format format = Format::plain;
    Dtype dtype = Dtype::f32;  // of the elements when plain, of scales and biases when affine
    int bits = 0;              // of a code
    int group = 0;             // columns that share a scale
    int64_t rows = 0;
    int64_t cols = 0;
    const std::byte* data = nullptr;    // codes or floats
    const std::byte* scales = nullptr;  // [rows, cols / group]
    const std::byte* biases = nullptr;  // affine only
    std::string label;                  // the checkpoint's name, for messages

    bool quantized() const { return format != Format::plain; }
    int64_t row_bytes() const;        // of codes or floats
    int64_t scale_row_bytes() const;  // of scales; the same for biases
    int64_t bytes() const {
        return rows * (row_bytes() + (biases ? 2 : quantized() ? 1 : 0) * scale_row_bytes());
    }
    Matrix rows_from(int64_t first, int64_t count) const;  // a view of some rows
};

// Experts of one projection: a matrix each, wherever they lie.
using ExpertMatrices = std::vector<Matrix>;

}  // namespace lily
