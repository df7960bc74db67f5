// The unit that multiplies matrices of many rows: simdgroup matrices, or the tensor operations of Metal 4 in
// one of two forms (docs/metal-prefill.md).
#pragma once

#include <cstdint>
#include <string>

#include "backend/metal/command.h"
#include "backend/metal/device.h"
#include "backend/metal/switches.h"

namespace lily::metal {

class KernelSet;
struct DeviceMatrix;

enum class MatrixPath : uint8_t { simdgroup, tensor_tiles, tensor_fragments };

// The best that this GPU and system have.
MatrixPath best_path(const Device& device, const Switches& switches);

const char* path_name(MatrixPath path);
const char* path_family(MatrixPath path);  // of its kernels

// How a product is cut into threadgroups.
struct Tiling {
    uint32_t rows, threads;
    uint32_t columns;         // of a dense product
    uint32_t pair_columns;    // of gate and up
    uint32_t expert_columns;  // of one matrix of each expert
};

constexpr Tiling tiling(MatrixPath path, uint32_t rows) {
    if (path == MatrixPath::simdgroup) return {rows, 128, rows >= 32 ? 64u : 32u, 32, 64};
    const uint32_t columns = rows == 16 ? 64 : 128;
    return {rows, rows == 16 ? 64u : 128u, columns, columns / 2, columns};
}

// Of a block of one sequence. A block reads all weights: about 9 % of the time of 2,048 rows on GPUs with
// tensor units, 4 % on others. It is also what can't be stopped: 2,048 rows of the 35B model take the latter
// 1 to 8 s, 4,096 rows the former 0.7 to 3 s (lily bench estimate).
constexpr int64_t block_rows(MatrixPath path) { return path == MatrixPath::simdgroup ? 2048 : 4096; }

constexpr uint32_t smallest_tile(MatrixPath path) { return path == MatrixPath::simdgroup ? 8 : 16; }

// Why products of 16, 32 and 64 rows with these weights on this path are not those of simdgroup matrices, or
// "": the registers' layout isn't documented, and compilers have got it wrong.
std::string disagreement(MatrixPath path, const DeviceMatrix& weights, KernelSet& kernels, Device& device,
                         CommandStream& stream, size_t activation_bytes);

}  // namespace lily::metal
