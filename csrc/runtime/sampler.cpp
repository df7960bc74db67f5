#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace lily {
namespace {

// splitmix64: a 64-bit mix of the seed and the draw's number.
uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

bool better(const Candidate& a, const Candidate& b) {
    return a.probability > b.probability || (a.probability == b.probability && a.token < b.token);
}

}  // namespace

Sampler::Sampler(const SamplingOptions& options) : options_(options) {}

void Sampler::observe(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) ++prompt_and_output_[token];
}

void Sampler::ensure_logits(int64_t count) { logits_.resize(static_cast<size_t>(count)); }

double Sampler::uniform() {
    const uint64_t bits = mix(mix(options_.seed) ^ mix(counter_++));
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

void Sampler::penalize() {
    const bool off = options_.repetition_penalty == 1.0f && options_.presence_penalty == 0.0f &&
                     options_.frequency_penalty == 0.0f;
    if (!off) {
        for (const auto& [token, count] : prompt_and_output_) {
            if (token < 0 || static_cast<size_t>(token) >= logits_.size()) continue;
            float& logit = logits_[static_cast<size_t>(token)];
            logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
            logit -= options_.presence_penalty + options_.frequency_penalty * static_cast<float>(count);
        }
    }
    for (const auto& [token, bias] : options_.logit_bias) {
        if (static_cast<size_t>(token) < logits_.size()) logits_[static_cast<size_t>(token)] += bias;
    }
    const float never = -std::numeric_limits<float>::infinity();
    for (size_t i = static_cast<size_t>(options_.vocabulary); i < logits_.size(); ++i) logits_[i] = never;
    if (!allowed_.empty()) {
        for (size_t i = 0; i < logits_.size(); ++i) {
            if (i >= allowed_.size() || !allowed_[i]) logits_[i] = never;
        }
    }
}

int32_t Sampler::largest() const {
    size_t best = 0;
    for (size_t i = 1; i < logits_.size(); ++i) {
        if (logits_[i] > logits_[best]) best = i;
    }
    return static_cast<int32_t>(best);
}

std::vector<Candidate> Sampler::distribution() {
    candidates_.clear();
    const float top = logits_[static_cast<size_t>(largest())];
    const float inverse = 1.0f / options_.temperature;
    const auto size = static_cast<int64_t>(logits_.size());
    for (int64_t i = 0; i < size; ++i) {
        const float logit = logits_[static_cast<size_t>(i)];
        if (logit > -std::numeric_limits<float>::infinity()) {
            candidates_.push_back({static_cast<int32_t>(i), (logit - top) * inverse});
        }
    }
    if (options_.top_k > 0 && options_.top_k < static_cast<int64_t>(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + options_.top_k - 1, candidates_.end(),
                         better);
        candidates_.resize(static_cast<size_t>(options_.top_k));
    }
    double total = 0;
    for (Candidate& c : candidates_) {
        c.probability = std::exp(c.probability);
        total += c.probability;
    }
    if (options_.min_p > 0) {  // the best candidate stands at 1 here
        std::erase_if(candidates_, [&](const Candidate& c) { return c.probability < options_.min_p; });
    }
    std::sort(candidates_.begin(), candidates_.end(), better);
    if (options_.top_p < 1) {
        double reached = 0;
        size_t kept = 0;
        while (kept < candidates_.size() && (kept == 0 || reached < options_.top_p * total)) {
            reached += candidates_[kept++].probability;
        }
        candidates_.resize(kept);
    }
    total = 0;
    for (const Candidate& c : candidates_) total += c.probability;
    for (Candidate& c : candidates_) c.probability = static_cast<float>(c.probability / total);
    return candidates_;
}

void Sampler::check_numbers() const {
    // A sum is NaN if one of its terms is, or if infinities of both signs meet; the loop tells which.
    float sum = 0;
    for (const float logit : logits_) sum += logit;
    if (!std::isnan(sum)) return;
    for (const float logit : logits_) {
        if (std::isnan(logit))
            throw BackendError("the model produced logits that are not numbers; the weights are damaged");
    }
}

void Sampler::keep_raw(std::span<const float> logits) {
    raw_.assign(logits.begin(), logits.end());
    double total = 0;
    const float top = *std::max_element(raw_.begin(), raw_.end());
    for (const float logit : raw_) total += std::exp(static_cast<double>(logit) - top);
    raw_norm_ = top + std::log(total);
}

int32_t Sampler::draw() {
    check_numbers();
    if (keep_raw_) keep_raw(logits_);
    return draw_from_logits();
}

int32_t Sampler::draw(std::span<const float> raw) {
    check_numbers();
    if (keep_raw_) keep_raw(raw);
    return draw_from_logits();
}

int32_t Sampler::draw_from_logits() {
    penalize();
    int32_t token = largest();
    if (logits_[static_cast<size_t>(token)] == -std::numeric_limits<float>::infinity()) {
        throw InvalidArgument("no token is allowed: every logit is minus infinity after bias and masks");
    }
    if (options_.temperature > 0) {
        const std::vector<Candidate> options = distribution();
        double left = uniform();
        token = options.back().token;
        for (const Candidate& c : options) {
            left -= c.probability;
            if (left < 0) {
                token = c.token;
                break;
            }
        }
    }
    ++prompt_and_output_[token];
    return token;
}

float Sampler::log_probability(int32_t token) const {
    if (static_cast<size_t>(token) >= raw_.size())
        throw InvalidArgument("no log probabilities were kept for this draw");
    return static_cast<float>(raw_[static_cast<size_t>(token)] - raw_norm_);
}

std::vector<std::pair<int32_t, float>> Sampler::best(int64_t count) const {
    std::vector<Candidate> all;
    for (size_t i = 0; i < raw_.size(); ++i) all.push_back({static_cast<int32_t>(i), raw_[i]});
    const auto n = static_cast<size_t>(std::min<int64_t>(count, static_cast<int64_t>(all.size())));
    std::partial_sort(all.begin(), all.begin() + static_cast<int64_t>(n), all.end(), better);
    std::vector<std::pair<int32_t, float>> result;
    for (size_t i = 0; i < n; ++i)
        result.emplace_back(all[i].token, static_cast<float>(all[i].probability - raw_norm_));
    return result;
}

}  // namespace lily
