// Draws the next token from logits: penalties, bias, temperature, top-k, top-p, min-p, in this order.
//
// One per request; owned by the caller. Random numbers come from a counter and the seed alone, so a request's
// draws don't depend on its neighbours or on the machine.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lily {

struct SamplingOptions {
    float temperature = 1.0f;  // 0: the largest logit, the lowest id among equals
    int64_t top_k = 0;         // 0: off
    float top_p = 1.0f;        // keeps the fewest tokens whose probability reaches this; at least one
    float min_p = 0.0f;        // drops tokens below this share of the best one's probability
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    std::vector<std::pair<int32_t, float>> logit_bias;
    uint64_t seed = 0;
    int64_t vocabulary = 0;  // ids from here on are never drawn (padded rows of the head)
};

// The distribution that draws come from, for checks and for speculative acceptance.
struct Candidate {
    int32_t token;
    float probability;
};

class Sampler {
  public:
    explicit Sampler(const SamplingOptions& options);

    // Tokens that penalties count: the prompt, then every accepted token.
    void observe(std::span<const int32_t> tokens);

    // Logits are written here, then draw() changes them. BackendError when one is NaN.
    std::span<float> logits() { return logits_; }
    void ensure_logits(int64_t count);
    int32_t draw();
    // draw() for logits that were changed from outside: log probabilities are kept of `raw` instead.
    int32_t draw(std::span<const float> raw);

    // After draw(): log softmax of the raw logits at `token`, and the `count` best drawable tokens with
    // theirs.
    float log_probability(int32_t token) const;
    std::vector<std::pair<int32_t, float>> best(int64_t count) const;
    void keep_log_probabilities(bool keep) { keep_raw_ = keep; }

    // The filtered distribution of the logits as they stand, most probable first.
    std::vector<Candidate> distribution();

    // Leaves out tokens (structured output): a mask of allowed ids for the next draw, empty for all.
    void allow_only(std::vector<uint8_t> mask) { allowed_ = std::move(mask); }

  private:
    void check_numbers() const;
    void keep_raw(std::span<const float> logits);
    int32_t draw_from_logits();
    void penalize();
    int32_t largest() const;
    // Candidates of the logits as they stand, normalised; in no order that a caller may rely on.
    void filter(int32_t best);
    void gather(float top);
    void keep_top_p(double total);
    double uniform();

    SamplingOptions options_;
    std::unordered_map<int32_t, int32_t> prompt_and_output_;
    std::vector<float> logits_;
    std::vector<float> raw_;
    std::vector<uint8_t> allowed_;
    std::vector<Candidate> candidates_;
    bool keep_raw_ = false;
    double raw_norm_ = 0;
    uint64_t counter_ = 0;
};

}  // namespace lily
