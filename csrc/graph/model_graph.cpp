#include "graph/model_graph.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace lily {
namespace {

constexpr int64_t kMaxRotaryDim = 512;

// Builds the op lists of one checkpoint; a local helper of ModelGraph::build.
class Builder {
  public:
    Builder(const ModelConfig& config, WeightStore& weights) : c_(config), w_(weights) {
        require_lanes("head_dim", c_.head_dim);
        require_lanes("linear_key_head_dim", c_.linear_key_head_dim);
        require_lanes("linear_value_head_dim", c_.linear_value_head_dim);
        if (c_.rotary_dim > kMaxRotaryDim) {
            throw CheckpointError("the rotary embedding covers " + std::to_string(c_.rotary_dim) +
                                  " dimensions of a head, at most " + std::to_string(kMaxRotaryDim) +
                                  " are supported");
        }
        attention_ = {c_.num_attention_heads, c_.num_key_value_heads, c_.head_dim, c_.rotary_dim,
                      c_.rope_theta};
        delta_ = {c_.linear_num_key_heads, c_.linear_num_value_heads, c_.linear_key_head_dim,
                  c_.linear_value_head_dim, c_.linear_conv_kernel_dim};
        experts_ = {c_.num_experts, c_.num_experts_per_tok, c_.moe_intermediate_size,
                    c_.shared_expert_intermediate_size, c_.norm_topk_prob};
        const int64_t mixed = std::max(delta_.values(), attention_.queries());
        residual_ = activation(c_.hidden_size);
        projected_ = activation(std::max(delta_.projected(), attention_.projected()));
        mixed_ = activation(mixed);
        normed_ = activation(c_.hidden_size);
        routing_ = activation(std::max<int64_t>(1, 2 * experts_.top_k + 1));
        expert_ = activation(std::max(experts_.slots() * std::max(experts_.width, experts_.shared_width),
                                      c_.intermediate_size));
        hidden_ = activation(c_.hidden_size);
    }

    ModelGraph build(KvDtype kv_dtype) {
        ModelGraph graph;
        int64_t delta_layers = 0;
        int64_t cache_layers = 0;
        const Matrix embedding = w_.take_matrix("embed_tokens", c_.vocab_size, c_.hidden_size);
        graph.trunk.push_back(Embed{embedding, residual_});
        for (int64_t i = 0; i < c_.num_hidden_layers; ++i) {
            const std::string layer = "layers." + std::to_string(i) + ".";
            if (c_.full_attention[static_cast<size_t>(i)]) {
                add_attention(graph.trunk, layer, static_cast<int>(cache_layers++), c_.norm_shift);
            } else {
                add_delta(graph.trunk, layer, static_cast<int>(delta_layers++));
            }
            const bool dense =
                c_.num_experts == 0 || std::find(c_.mlp_only_layers.begin(), c_.mlp_only_layers.end(), i) !=
                                           c_.mlp_only_layers.end();
            add_mlp(graph.trunk, layer, dense, c_.norm_shift);
        }
        const Matrix head =
            c_.tie_word_embeddings ? embedding : w_.take_matrix("lm_head", c_.vocab_size, c_.hidden_size);
        graph.trunk.push_back(
            Head{residual_, norm("norm", c_.hidden_size, c_.norm_shift), eps_, head, hidden_});
        graph.state.kv = {cache_layers, c_.num_key_value_heads, c_.head_dim, kv_dtype};
        graph.state.recurrent = {delta_layers,     delta_.value_heads, delta_.key_dim,
                                 delta_.value_dim, delta_.channels(),  delta_.conv_width - 1};
        if (w_.has("mtp.fc")) {
            build_mtp(graph, embedding, head);
            graph.mtp_state.kv = {1, c_.num_key_value_heads, c_.head_dim, kv_dtype};
        }
        graph.activation_widths = widths_;
        graph.hidden = hidden_;
        return graph;
    }

  private:
    // Kernels work on heads in whole vectors.
    static void require_lanes(const char* key, int64_t size) {
        if (size % 16 != 0) {
            throw CheckpointError(std::string(key) + " is " + std::to_string(size) +
                                  ", only multiples of 16 are supported");
        }
    }

    Activation activation(int64_t width) {
        widths_.push_back(width);
        return static_cast<Activation>(widths_.size() - 1);
    }

    Vector norm(const std::string& name, int64_t size, bool shift) {
        std::vector<float> values = w_.take_vector(name, size);
        if (shift) {
            for (float& value : values) value += 1.0f;
        }
        return std::make_shared<const std::vector<float>>(std::move(values));
    }

    Vector vector(const std::string& name, int64_t size) { return norm(name, size, false); }

    // Stored per channel, wanted per tap: neighbouring channels are computed together.
    Vector convolution(const std::string& name) {
        const int64_t channels = delta_.channels();
        const int64_t width = delta_.conv_width;
        const std::vector<float> stored = w_.take_vector(name, channels * width);
        std::vector<float> taps(stored.size());
        for (int64_t c = 0; c < channels; ++c) {
            for (int64_t t = 0; t < width; ++t) {
                taps[static_cast<size_t>(t * channels + c)] = stored[static_cast<size_t>(c * width + t)];
            }
        }
        return std::make_shared<const std::vector<float>>(std::move(taps));
    }

    void add_attention(std::vector<Op>& ops, const std::string& layer, int cache, bool shift) {
        const std::string p = layer + "self_attn.";
        const int64_t h = c_.hidden_size;
        ops.push_back(NormProject{residual_,
                                  norm(layer + "input_layernorm", h, shift),
                                  eps_,
                                  {w_.take_matrix(p + "q_proj", 2 * attention_.queries(), h),
                                   w_.take_matrix(p + "k_proj", attention_.keys(), h),
                                   w_.take_matrix(p + "v_proj", attention_.keys(), h)},
                                  projected_});
        ops.push_back(RotaryAppend{projected_, attention_, norm(p + "q_norm", c_.head_dim, shift),
                                   norm(p + "k_norm", c_.head_dim, shift), eps_, cache});
        ops.push_back(Attend{projected_, attention_, cache, mixed_});
        ops.push_back(ProjectAdd{mixed_, w_.take_matrix(p + "o_proj", h, attention_.queries()), residual_});
    }

    void add_delta(std::vector<Op>& ops, const std::string& layer, int state) {
        const std::string p = layer + "linear_attn.";
        const int64_t h = c_.hidden_size;
        NormProject project{
            residual_, norm(layer + "input_layernorm", h, c_.norm_shift), eps_, {}, projected_};
        if (w_.has(p + "in_proj_qkvz")) {
            project.weights = interleaved_projections(p);
        } else {
            project.weights = {w_.take_matrix(p + "in_proj_qkv", delta_.channels(), h),
                               w_.take_matrix(p + "in_proj_z", delta_.values(), h),
                               w_.take_matrix(p + "in_proj_b", delta_.value_heads, h),
                               w_.take_matrix(p + "in_proj_a", delta_.value_heads, h)};
        }
        ops.push_back(std::move(project));
        ops.push_back(DeltaRule{projected_, delta_, convolution(p + "conv1d"),
                                vector(p + "A_log", delta_.value_heads),
                                vector(p + "dt_bias", delta_.value_heads),
                                vector(p + "norm", delta_.value_dim), eps_, state, mixed_});
        ops.push_back(ProjectAdd{mixed_, w_.take_matrix(p + "out_proj", h, delta_.values()), residual_});
    }

    // Qwen3-Next stores q|k|v|z and b|a interleaved by key head; the rows are put in order once, as a copy.
    std::vector<Matrix> interleaved_projections(const std::string& p) {
        const int64_t ratio = delta_.value_heads / delta_.key_heads;
        const int64_t value_rows = ratio * delta_.value_dim;
        const int64_t stride = 2 * delta_.key_dim + 2 * value_rows;
        std::vector<int64_t> qkvz;
        const auto part = [&](int64_t offset, int64_t count) {
            for (int64_t head = 0; head < delta_.key_heads; ++head) {
                for (int64_t i = 0; i < count; ++i) qkvz.push_back(head * stride + offset + i);
            }
        };
        part(0, delta_.key_dim);
        part(delta_.key_dim, delta_.key_dim);
        part(2 * delta_.key_dim, value_rows);
        part(2 * delta_.key_dim + value_rows, value_rows);
        std::vector<int64_t> ba;
        for (const int64_t offset : {int64_t{0}, ratio}) {
            for (int64_t head = 0; head < delta_.key_heads; ++head) {
                for (int64_t i = 0; i < ratio; ++i) ba.push_back(head * 2 * ratio + offset + i);
            }
        }
        return {
            w_.take_reordered(p + "in_proj_qkvz", delta_.channels() + delta_.values(), c_.hidden_size, qkvz),
            w_.take_reordered(p + "in_proj_ba", 2 * delta_.value_heads, c_.hidden_size, ba)};
    }

    void add_mlp(std::vector<Op>& ops, const std::string& layer, bool dense, bool shift) {
        const std::string p = layer + "mlp.";
        const int64_t h = c_.hidden_size;
        const Vector weight = norm(layer + "post_attention_layernorm", h, shift);
        if (dense) {
            const int64_t width = c_.intermediate_size;
            ops.push_back(NormGateUp{residual_, weight, eps_, w_.take_matrix(p + "gate_proj", width, h),
                                     w_.take_matrix(p + "up_proj", width, h), expert_});
            ops.push_back(ProjectAdd{expert_, w_.take_matrix(p + "down_proj", h, width), residual_});
            return;
        }
        Route route{residual_, weight,   eps_,    w_.take_matrix(p + "gate", experts_.experts, h),
                    {},        experts_, normed_, routing_};
        ExpertsUp up{normed_, routing_, experts_, {}, {}, {}, {}, expert_};
        ExpertsDown down{expert_, routing_, experts_, {}, {}, residual_};
        take_experts(p + "experts.", up, down);
        if (experts_.shared_width > 0) {
            const std::string s = p + "shared_expert.";
            route.shared_gate = {w_.take_matrix(p + "shared_expert_gate", 1, h)};
            up.shared_gate = {w_.take_matrix(s + "gate_proj", experts_.shared_width, h)};
            up.shared_up = {w_.take_matrix(s + "up_proj", experts_.shared_width, h)};
            down.shared_down = {w_.take_matrix(s + "down_proj", h, experts_.shared_width)};
        }
        ops.push_back(std::move(route));
        ops.push_back(std::move(up));
        ops.push_back(std::move(down));
    }

    // Experts come stacked per projection, with gate and up fused, or one tensor each.
    void take_experts(const std::string& p, ExpertsUp& up, ExpertsDown& down) {
        const int64_t e = experts_.experts;
        const int64_t width = experts_.width;
        const int64_t h = c_.hidden_size;
        if (w_.has(p + "gate_up_proj")) {
            for (const Matrix& fused : w_.take_stack(p + "gate_up_proj", e, 2 * width, h)) {
                up.gate.push_back(fused.rows_from(0, width));
                up.up.push_back(fused.rows_from(width, width));
            }
            down.down = w_.take_stack(p + "down_proj", e, h, width);
        } else if (w_.has(p + "0.gate_proj")) {
            for (int64_t i = 0; i < e; ++i) {
                const std::string one = p + std::to_string(i) + ".";
                up.gate.push_back(w_.take_matrix(one + "gate_proj", width, h));
                up.up.push_back(w_.take_matrix(one + "up_proj", width, h));
                down.down.push_back(w_.take_matrix(one + "down_proj", h, width));
            }
        } else {
            up.gate = w_.take_stack(p + "gate_proj", e, width, h);
            up.up = w_.take_stack(p + "up_proj", e, width, h);
            down.down = w_.take_stack(p + "down_proj", e, h, width);
        }
    }

    // The head predicts the token after next: it reads the next token's embedding and the trunk's hidden row.
    void build_mtp(ModelGraph& graph, const Matrix& embedding, const Matrix& head) {
        const bool shift = c_.mtp_norm_shift;
        const int64_t h = c_.hidden_size;
        const Activation next = activation(h);
        graph.mtp.push_back(Embed{embedding, next});
        graph.mtp.push_back(CombineHidden{next, hidden_, norm("mtp.pre_fc_norm_embedding", h, shift),
                                          norm("mtp.pre_fc_norm_hidden", h, shift), eps_,
                                          w_.take_matrix("mtp.fc", h, 2 * h), residual_});
        add_attention(graph.mtp, "mtp.layers.0.", 0, shift);
        add_mlp(graph.mtp, "mtp.layers.0.", c_.num_experts == 0, shift);
        graph.mtp.push_back(Head{residual_, norm("mtp.norm", h, shift), eps_, head, hidden_});
    }

    const ModelConfig& c_;
    WeightStore& w_;
    float eps_ = static_cast<float>(c_.rms_norm_eps);
    AttentionShape attention_{};
    DeltaShape delta_{};
    ExpertShape experts_{};
    std::vector<int64_t> widths_;
    Activation residual_, projected_, mixed_, normed_, routing_, expert_, hidden_;
};

}  // namespace

ModelGraph ModelGraph::build(const ModelConfig& config, WeightStore& weights, KvDtype kv_dtype) {
    return Builder(config, weights).build(kv_dtype);
}

}  // namespace lily
