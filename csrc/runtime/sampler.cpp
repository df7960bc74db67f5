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

// Beyond this below the best logit, all tokens of a vocabulary together weigh less than the random numbers
// resolve; their probability is more than kLeastProbability.
constexpr float kReach = 49.0f;

constexpr float kNever = -std::numeric_limits<float>::infinity();

float maximum(std::span<const float> values) {
    // Eight running maxima, which the compiler keeps in vector registers.
    constexpr size_t kLanes = 8;
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, kNever);
    size_t i = 0;
    for (; i + kLanes <= values.size(); i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
    }
    for (; i < values.size(); ++i) lanes[0] = std::max(lanes[0], values[i]);
    return *std::max_element(lanes, lanes + kLanes);
}

// Adds the `count` best of the logits from `threshold` on, in no order; count is 1 or more.
void keep_best(std::span<const float> logits, size_t count, float threshold, std::vector<Candidate>& best) {
    const auto cut = [&] {
        const auto last = best.begin() + static_cast<int64_t>(count) - 1;
        std::nth_element(best.begin(), last, best.end(), better);
        best.resize(count);
        threshold = best.back().probability;
    };
    for (size_t i = 0; i < logits.size(); ++i) {
        if (logits[i] < threshold) continue;
        best.push_back({static_cast<int32_t>(i), logits[i]});
        if (best.size() >= 2 * count) cut();
    }
    if (best.size() > count) cut();
}

}  // namespace

Sampler::Sampler(const SamplingOptions& options) : options_(options) {}

void Sampler::observe(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) ++prompt_and_output_[token];
}

void Sampler::ensure_logits(int64_t count) { logits_.resize(static_cast<size_t>(count)); }

uint64_t Sampler::uniform(uint64_t counter) const { return mix(mix(options_.seed) ^ mix(counter)) >> 11; }

void Sampler::penalize() {
    if (penalizes()) {
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
    for (size_t i = static_cast<size_t>(options_.vocabulary); i < logits_.size(); ++i) logits_[i] = kNever;
    if (!allowed_.empty()) {
        for (size_t begin = 0; begin < logits_.size(); begin += 32) {
            const uint32_t word = begin / 32 < allowed_.size() ? allowed_[begin / 32] : 0;
            if (word == ~uint32_t{0}) continue;
            const size_t count = std::min<size_t>(32, logits_.size() - begin);
            for (size_t i = 0; i < count; ++i) {
                if (!(word >> i & 1)) logits_[begin + i] = kNever;
            }
        }
    }
}

int32_t Sampler::largest() const {
    const float top = maximum(logits_);
    return static_cast<int32_t>(std::find(logits_.begin(), logits_.end(), top) - logits_.begin());
}

void Sampler::gather(float top) {
    candidates_.clear();
    if (top == kNever) return;
    const bool limited = options_.top_k > 0 && static_cast<size_t>(options_.top_k) < logits_.size();
    keep_best(logits_, limited ? static_cast<size_t>(options_.top_k) : logits_.size(),
              top - kReach * options_.temperature, candidates_);
}

void Sampler::keep_top_p(Mass total) {
    // The first place that reaches top_p of all; min-p may have left less than that.
    const auto numerator = static_cast<uint64_t>(static_cast<double>(options_.top_p) * 0x1p53);
    const Mass wanted = total - share_of(total, (uint64_t{1} << 53) - numerator);
    if (wanted >= mass_of(candidates_)) return;
    const Candidate last = ranking_.find(candidates_, wanted > 0 ? wanted - 1 : 0).candidate;
    std::erase_if(candidates_, [&](const Candidate& c) { return better(last, c); });
}

void Sampler::filter(int32_t best) {
    if (options_.temperature <= 0) {
        candidates_.assign(1, {best, 1.0f});
        return;
    }
    const float top = logits_[static_cast<size_t>(best)];
    const float inverse = 1.0f / options_.temperature;
    gather(top);
    for (Candidate& c : candidates_) {  // the best may be infinite
        c.probability = c.probability == top ? 1.0f : std::exp((c.probability - top) * inverse);
    }
    const Mass total = options_.top_p < 1 ? mass_of(candidates_) : 0;
    if (options_.min_p > 0) {  // the best candidate stands at 1 here
        std::erase_if(candidates_, [&](const Candidate& c) { return c.probability < options_.min_p; });
    }
    if (options_.top_p < 1) keep_top_p(total);
    if (options_.xtc_probability > 0) {
        const double chance = static_cast<double>(uniform(counter_ + 1)) * 0x1p-53;
        if (chance < options_.xtc_probability) exclude_top();
    }
}

void Sampler::exclude_top() {
    const auto total = static_cast<double>(mass_of(candidates_)) * 0x1p-96;
    const auto reaches = [&](const Candidate& c) {
        return static_cast<float>(c.probability / total) >= options_.xtc_threshold;
    };
    const Candidate* least = nullptr;
    for (const Candidate& c : candidates_) {
        if (reaches(c) && (!least || better(*least, c))) least = &c;
    }
    if (!least) return;
    const int32_t kept = least->token;
    std::erase_if(candidates_, [&](const Candidate& c) { return reaches(c) && c.token != kept; });
}

std::vector<Candidate> Sampler::distribution() {
    if (logits_.empty()) return {};
    check_numbers();
    filter(largest());
    std::sort(candidates_.begin(), candidates_.end(), better);
    const auto total = static_cast<double>(mass_of(candidates_)) * 0x1p-96;
    std::vector<Candidate> result = candidates_;
    for (Candidate& c : result) c.probability = static_cast<float>(c.probability / total);
    return result;
}

void Sampler::check_numbers() const {
    if (logits_.empty()) throw InvalidArgument("no token can be drawn: there are no logits");
    unsigned bad = 0;
    for (const float logit : logits_) bad |= static_cast<unsigned>(std::isnan(logit));
    if (bad) throw BackendError("the model produced logits that are not numbers; the weights are damaged");
}

void Sampler::keep_raw(std::span<const float> logits) {
    raw_.assign(logits.begin(), logits.end());
    double total = 0;
    const float top = maximum(raw_);
    for (const float logit : raw_) total += std::exp(logit - top);
    raw_norm_ = top + std::log(total);
}

const char* Sampler::needs_logits() const {
    if (keep_raw_) return "log probabilities";
    if (!allowed_.empty()) return "tokens left out";
    if (penalizes()) return "penalties";
    if (!options_.logit_bias.empty()) return "logit bias";
    if (options_.temperature > 0 && options_.xtc_probability > 0) return "XTC";
    return nullptr;
}

Choice Sampler::choice() const {
    const Choice greedy{.vocabulary = options_.vocabulary};
    if (options_.temperature <= 0) return greedy;
    return {options_.temperature, options_.top_k, options_.top_p,
            options_.min_p,       options_.seed,  options_.vocabulary};
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
    if (logits_[static_cast<size_t>(token)] == kNever) {
        throw InvalidArgument("no token is allowed: every logit is minus infinity after bias and masks");
    }
    if (options_.temperature > 0) {
        filter(token);
        token = ranking_.find(candidates_, share_of(mass_of(candidates_), uniform(counter_))).candidate.token;
        counter_ += options_.xtc_probability > 0 ? 2 : 1;
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
    const size_t drawable = std::min(raw_.size(), static_cast<size_t>(options_.vocabulary));
    const size_t wanted = std::min(static_cast<size_t>(count), drawable);
    if (wanted == 0) return {};
    std::vector<Candidate> all;
    keep_best({raw_.data(), drawable}, wanted, kNever, all);
    std::sort(all.begin(), all.end(), better);
    std::vector<std::pair<int32_t, float>> result;
    for (const Candidate& c : all)
        result.emplace_back(c.token, static_cast<float>(c.probability - raw_norm_));
    return result;
}

}  // namespace lily
