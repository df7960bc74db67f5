// The model, written once: which fused operations run, in which order, on which tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/ops.h"
#include "graph/config.h"
#include "state/sequence.h"
#include "weights/weight_store.h"

namespace lily {

struct ModelGraph {
    std::vector<Op> trunk;  // tokens -> logits of the wanted rows
    std::vector<Op> mtp;    // empty without a multi-token-prediction head
    std::vector<int64_t> activation_widths;
    Activation hidden = 0;  // after the final norm
    StateLayout state;
    StateLayout mtp_state;

    // Takes every weight it needs out of the store; CheckpointError names what is missing or misshapen.
    static ModelGraph build(const ModelConfig& config, WeightStore& weights, KvDtype kv_dtype);
};

}  // namespace lily
