// Choices of tokens as the kernels take and give them.
#pragma once

#include <cstdint>

#include "backend/choice.h"
#include "backend/metal/step.h"

namespace lily::metal {

SampleOptions sample_options(const Choice& choice);

// BackendError for the key of a row whose logits aren't numbers.
void require_number(uint32_t key);

}  // namespace lily::metal
