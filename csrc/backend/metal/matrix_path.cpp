#include "backend/metal/matrix_path.h"

#include "backend/metal/rows.h"
#include "backend/metal/self_test.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr int kTensorUnits = 10;  // family of the first GPUs that have some
constexpr uint32_t kTestedTiles[] = {16, 32, 64};
// Both paths sum the same products in fp32 and round once; a sum's order costs less than an ulp of bf16.
constexpr float kShare = 1.0f / 16;

}  // namespace

MatrixPath best_path(const Device& device, const Switches& switches) {
    // fp32 operands would be rounded to less than fp16 by the tensor units.
    const bool tensor = switches.tensor_operations && switches.bf16_activations;
    if (!tensor || device.family() < kTensorUnits || !system_at_least(26, 1)) return MatrixPath::simdgroup;
    return system_at_least(26, 2) && switches.tensor_fragments ? MatrixPath::tensor_fragments
                                                               : MatrixPath::tensor_tiles;
}

const char* path_name(MatrixPath path) {
    return path == MatrixPath::simdgroup      ? "simdgroup matrices"
           : path == MatrixPath::tensor_tiles ? "tensor tiles"
                                              : "tensor fragments";
}

const char* path_family(MatrixPath path) {
    return path == MatrixPath::simdgroup ? "matrix_simdgroup" : "matrix_tensor";
}

std::string disagreement(MatrixPath path, const DeviceMatrix& w, KernelSet& kernels, Device& device,
                         CommandStream& stream, size_t activation_bytes) try {
    const DeviceBuffer in = device.allocate(64 * size_t{w.cols} * activation_bytes, "self-test");
    const DeviceBuffer expected = device.allocate(64 * size_t{w.rows} * activation_bytes, "self-test");
    const DeviceBuffer got = device.allocate(64 * size_t{w.rows} * activation_bytes, "self-test");
    fill_with_noise(in, 64 * size_t{w.cols}, activation_bytes);
    for (const uint32_t rows : kTestedTiles) {
        Pass pass = stream.begin("self-test");
        for (const auto& [tried, out] :
             {std::pair{MatrixPath::simdgroup, &expected}, std::pair{path, &got}}) {
            const Tiling t = tiling(tried, rows);
            const std::string name = "project_rows_" + w.format.name + "_t" + std::to_string(rows);
            pass.launch(kernels.of(w.format).get(path_family(tried), name),
                        {reads(w.codes), reads(w.scales), reads(w.biases), reads(in), writes(*out),
                         constant(RowsShape{rows, w.cols, w.rows, w.rows, w.group_shift, 0.0f})},
                        {divided(w.rows, t.columns), 1}, {t.threads});
        }
        pass.commit().wait();
        const std::string problem = difference(expected, got, size_t{rows} * w.rows, activation_bytes, kShare,
                                               "a product of " + std::to_string(rows) + " rows");
        if (!problem.empty()) return problem;
    }
    return "";
} catch (const BackendError& error) {
    return error.what();
}

}  // namespace lily::metal
