// The Metal backend: fused operations become launches of the kernels in metal/, eight rows at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace lily::metal {

// What can be switched off alone: see switches.h. BackendError if there is no usable GPU.
std::unique_ptr<Backend> make_metal_backend(const BackendOptions& options);

// What became of compiling every kernel that this build has, each as a pipeline.
struct CompiledFamily {
    std::string family;
    size_t kernels = 0;
    std::string problem;  // "" if all are there
};
std::vector<CompiledFamily> compile_kernels();

}  // namespace lily::metal
