// The Metal backend: fused operations become launches of the kernels in metal/, eight rows at a time.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace lily::metal {

// What can be switched off alone: see Switches in choices.h. BackendError if there is no usable GPU.
std::unique_ptr<Backend> make_metal_backend(const BackendOptions& options);

}  // namespace lily::metal
