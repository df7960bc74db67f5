// The CPU backend: cuts fused operations into pieces for the threads and calls the kernels of the best
// instruction set.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace lily::cpu {

// What can be switched off alone: "integer_dot" (weights are expanded to fp32), "byte_dot" (one row takes the
// route of several), "avx512vnni", "avxvnni" and "avx2" (the next smaller instruction set).
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace lily::cpu
