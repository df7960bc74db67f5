// The architecture in numbers; field names are those of the Hugging Face configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lily {

struct ModelConfig {
    int64_t vocab_size = 0;
    int64_t hidden_size = 0;
    int64_t num_hidden_layers = 0;
    std::vector<bool> full_attention;  // per layer; false is a Gated DeltaNet layer
    int64_t num_attention_heads = 0;
    int64_t num_key_value_heads = 0;
    int64_t head_dim = 0;
    int64_t rotary_dim = 0;
    double rope_theta = 0;
    int64_t linear_num_key_heads = 0;
    int64_t linear_num_value_heads = 0;
    int64_t linear_key_head_dim = 0;
    int64_t linear_value_head_dim = 0;
    int64_t linear_conv_kernel_dim = 0;
    int64_t num_experts = 0;  // 0: every layer is dense
    int64_t num_experts_per_tok = 0;
    int64_t moe_intermediate_size = 0;
    int64_t shared_expert_intermediate_size = 0;  // 0: no shared expert
    int64_t intermediate_size = 0;
    std::vector<int64_t> mlp_only_layers;
    bool norm_topk_prob = true;
    double rms_norm_eps = 1e-6;
    bool tie_word_embeddings = false;
    int64_t max_position_embeddings = 0;
    int64_t mtp_num_hidden_layers = 0;
    bool norm_shift = false;      // trunk: stored norm weights are zero-centred
    bool mtp_norm_shift = false;  // the same for the multi-token-prediction head
};

}  // namespace lily
