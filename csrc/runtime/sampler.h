// Draws the next token from logits: penalties, bias, temperature, top-k, min-p, top-p, XTC, in this order.
//
// One per request; owned by the caller. Random numbers come from a counter and the seed alone, so a request's
// draws don't depend on its neighbours. A draw is the first candidate, most probable first, through which the
// probability exceeds the random number.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backend/choice.h"
#include "runtime/ranking.h"

namespace lily {

struct SamplingOptions {
    float temperature = 1.0f;      // 0: the largest logit, the lowest id among equals
    int64_t top_k = 0;             // 0: off
    float top_p = 1.0f;            // keeps the fewest tokens whose probability reaches this; at least one
    float min_p = 0.0f;            // drops tokens below this share of the best one's probability
    float xtc_probability = 0.0f;  // how often the most probable tokens are left out; 0: never
    float xtc_threshold = 0.1f;    // ... those that reach this probability, but for the least of them
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    LogitBias logit_bias;
    uint64_t seed = 0;
    int64_t vocabulary = 0;  // ids from here on are never drawn (padded rows of the head)
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

    // Why only the host can make this draw, or null; then choice() says it to a backend that makes it, and
    // accept() takes its token into account.
    const char* needs_logits() const;
    Choice choice() const;
    // InvalidArgument for kNoToken.
    void accept(int32_t token);

    // After draw(): log softmax of the raw logits at `token`, and the `count` best drawable tokens with
    // theirs.
    float log_probability(int32_t token) const;
    std::vector<std::pair<int32_t, float>> best(int64_t count) const;
    void keep_log_probabilities(bool keep) { keep_raw_ = keep; }

    // The filtered distribution of the logits as they stand, most probable first, for checks and for
    // speculative acceptance. With XTC: what the next draw would come from, its chance to leave out the best
    // already decided.
    std::vector<Candidate> distribution();

    // Leaves out tokens (structured output) until told otherwise: bit i % 32 of word i / 32 allows id i, ids
    // beyond the words are left out. No words allow all.
    void allow_only(std::span<const uint32_t> words) { allowed_.assign(words.begin(), words.end()); }

  private:
    void check_numbers() const;
    void keep_raw(std::span<const float> logits);
    int32_t draw_from_logits();
    bool penalizes() const {
        return options_.repetition_penalty != 1.0f || options_.presence_penalty != 0.0f ||
               options_.frequency_penalty != 0.0f;
    }
    void penalize();
    int32_t largest() const;
    // Candidates of the logits as they stand, their probabilities relative to the best one's, counted by
    // ranking_; returns the mass of those up to last_.
    Mass filter(int32_t best);
    void gather(float top);
    // Of candidates with a mass, those up to last_ together have top_p of the total; returns their mass.
    Mass keep_top_p(Mass mass, Mass total);
    void drop_rest();
    // Exclude top choices (XTC): of the tokens that reach the threshold, only the least probable stays.
    Mass exclude_top(Mass mass);
    // The number that draw `counter` decides by, in units of 2^-53 below 1.
    uint64_t uniform(uint64_t counter) const;

    SamplingOptions options_;
    TokenCounts prompt_and_output_;
    uint64_t history_;  // Choice::history
    int64_t accepted_ = 0;
    std::vector<float> logits_;
    std::vector<float> raw_;
    std::vector<uint32_t> allowed_;
    std::vector<float> shares_;  // of every logit, relative to the best one's
    std::vector<Candidate> candidates_;
    std::optional<Candidate> last_;  // of the candidates, in order, that can be drawn; else all can
    Ranking ranking_;
    bool keep_raw_ = false;
    double raw_norm_ = 0;
    uint64_t counter_ = 0;
};

}  // namespace lily
