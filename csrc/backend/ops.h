// The fused operations a backend implements. The graph lists them in order; each names the activations it
// reads and writes, so that a backend can overlap what is independent.
//
// Activations are row-major [rows, width], one row per token of the batch, and live in the backend. Weights
// are views of mapped memory. Formulas: x is a row, W a matrix, rms(x) = x / sqrt(mean(x^2) + eps).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "weights/matrix.h"

namespace lily {

// An activation buffer of the graph, by index.
using Activation = int;

using Vector = std::shared_ptr<const std::vector<float>>;  // a small fp32 parameter

struct DeltaShape {  // Gated DeltaNet
    int64_t key_heads, value_heads, key_dim, value_dim, conv_width;
    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }  // through the convolution: q | k | v
    int64_t projected() const { return channels() + values() + 2 * value_heads; }  // qkv | z | b | a
};

struct AttentionShape {
    int64_t heads, kv_heads, head_dim, rotary_dim;
    double rope_theta;
    int64_t queries() const { return heads * head_dim; }
    int64_t keys() const { return kv_heads * head_dim; }
    int64_t projected() const { return 2 * queries() + 2 * keys(); }  // per head q | gate, then k, then v
};

struct ExpertShape {
    int64_t experts, top_k, width, shared_width;
    bool normalize;  // routing weights of the chosen experts sum to 1
    int64_t slots() const { return top_k + (shared_width > 0 ? 1 : 0); }
};

// out = row `token` of the table
struct Embed {
    Matrix table;
    Activation out;
};

// out = [W0 n; W1 n; ...] with n = rms(in) * norm
struct NormProject {
    Activation in;
    Vector norm;
    float eps;
    std::vector<Matrix> weights;
    Activation out;
};

// Causal convolution and SiLU over q|k|v, q and k to unit length (q also / sqrt(key_dim)), then per value
// head
//   decay = exp(-exp(a_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
//   S <- decay S + k (beta (v - decay S^T k))^T,  o = S^T q,  out = rms(o) * norm * silu(z)
// Reads and advances the recurrent and convolution state of GDN layer `state`.
struct DeltaRule {
    Activation in;
    DeltaShape shape;
    Vector conv;  // [conv_width, channels], oldest input first
    Vector a_log, dt_bias, norm;
    float eps;
    int state;
    Activation out;
};

// q/k norm and rotary embedding; keys and values are appended to cache layer `cache`; q is rewritten in
// place.
struct RotaryAppend {
    Activation projected;
    AttentionShape shape;
    Vector q_norm, k_norm;
    float eps;
    int cache;
};

// out = softmax(q K^T / sqrt(head_dim), causal) V * sigmoid(gate)
struct Attend {
    Activation projected;
    AttentionShape shape;
    int cache;
    Activation out;
};

// residual += W in
struct ProjectAdd {
    Activation in;
    Matrix weight;
    Activation residual;
};

// normed = rms(in) * norm; logits = [router; shared gate] normed; then the top_k experts of each row and
// their softmax weights, written as top_k pairs (weight, expert) and the sigmoid of the shared gate.
struct Route {
    Activation in;
    Vector norm;
    float eps;
    Matrix router;
    std::vector<Matrix> shared_gate;  // none or one
    ExpertShape shape;
    Activation normed;
    Activation routing;
};

// out[slot] = silu(gate_e x) * (up_e x) for the chosen experts; the shared expert is the last slot.
struct ExpertsUp {
    Activation in;
    Activation routing;
    ExpertShape shape;
    ExpertMatrices gate, up;
    std::vector<Matrix> shared_gate, shared_up;
    Activation out;  // [rows, slots * max(width, shared_width)]
};

// residual += sum over slots of weight_slot * (down_e in[slot])
struct ExpertsDown {
    Activation in;
    Activation routing;
    ExpertShape shape;
    ExpertMatrices down;
    std::vector<Matrix> shared_down;
    Activation residual;
};

// out = silu(gate n) * (up n) with n = rms(in) * norm
struct NormGateUp {
    Activation in;
    Vector norm;
    float eps;
    Matrix gate, up;
    Activation out;
};

// hidden = rms(in) * norm and, for the rows that the batch asks for, logits = W hidden
struct Head {
    Activation in;
    Vector norm;
    float eps;
    Matrix weight;
    Activation hidden;
};

// out = W [rms(embedding of the next token) * embedding_norm ; rms(hidden) * hidden_norm]
struct CombineHidden {
    Activation embedding;
    Activation hidden;
    Vector embedding_norm, hidden_norm;
    float eps;
    Matrix weight;
    Activation out;
};

using Op = std::variant<Embed, NormProject, DeltaRule, RotaryAppend, Attend, ProjectAdd, Route, ExpertsUp,
                        ExpertsDown, NormGateUp, Head, CombineHidden>;

std::string_view op_name(const Op& op);
std::vector<const Matrix*> matrices(const Op& op);
// What a row of the operation's result is on every backend: where it is, and how many numbers; {-1, 0} if it
// is a state, or of a form that the backend may choose.
std::pair<Activation, int64_t> result(const Op& op);

}  // namespace lily
