#include "backend/metal/choosing.h"

#include "base/error.h"

namespace lily::metal {

SampleOptions sample_options(const Choice& choice) {
    SampleOptions options;
    options.temperature = choice.temperature;
    options.top_k = static_cast<uint32_t>(choice.top_k);
    options.top_p = choice.top_p;
    options.min_p = choice.min_p;
    options.seed_low = static_cast<uint32_t>(choice.seed);
    options.seed_high = static_cast<uint32_t>(choice.seed >> 32);
    return options;
}

void require_number(uint32_t key) {
    if (key == kNotANumber)
        throw BackendError("the model produced logits that are not numbers; the weights are damaged");
}

}  // namespace lily::metal
