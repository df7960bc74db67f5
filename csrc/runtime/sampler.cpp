#include "runtime/sampler.h"

#include <algorithm>
#include <atomic>
#include <bit>
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

constexpr const char* kNoneAllowed =
    "no token is allowed: every logit is minus infinity after bias and masks";

uint64_t new_history() {
    static std::atomic<uint64_t> histories{0};
    return ++histories;
}

// exp(x) of x <= 0, by the same operations on every machine: so are the draws. What is below -87 counts as
// that. With x = n ln 2 + r, the power of two is exact, and r so small that eight terms of the series are
// enough; ln 2 is taken in two pieces, of which the first times n is exact.
float exponential(float x) {
    constexpr float kNearest = 0x1.8p23f;  // added and subtracted, it leaves the nearest whole number
    x = x > -87.0f ? x : -87.0f;
    const float n = (x * 1.44269504f + kNearest) - kNearest;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 1.0f / 2;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return sum * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

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

Sampler::Sampler(const SamplingOptions& options) : options_(options), history_(new_history()) {}

void Sampler::observe(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) ++prompt_and_output_[token];
    history_ = new_history();
}

void Sampler::accept(int32_t token) {
    if (token == kNoToken) throw InvalidArgument(kNoneAllowed);
    ++prompt_and_output_[token];
    ++accepted_;
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
    const size_t most = limited ? static_cast<size_t>(options_.top_k) : logits_.size();
    if (std::isinf(top)) {  // what is infinite is certain
        keep_best(logits_, most, top, candidates_);
        for (Candidate& c : candidates_) c.probability = 1.0f;
        return;
    }
    const float inverse = 1.0f / options_.temperature;
    const float threshold = top - kReach * options_.temperature;
    if (limited) {
        keep_best(logits_, most, threshold, candidates_);
        for (Candidate& c : candidates_) c.probability = exponential((c.probability - top) * inverse);
        return;
    }
    shares_.resize(logits_.size());
    candidates_.resize(logits_.size());
    for (size_t i = 0; i < logits_.size(); ++i) shares_[i] = exponential((logits_[i] - top) * inverse);
    size_t near = 0;
    for (size_t i = 0; i < logits_.size(); ++i) {
        candidates_[near] = {static_cast<int32_t>(i), shares_[i]};
        near += logits_[i] >= threshold;
    }
    candidates_.resize(near);
}

Mass Sampler::keep_top_p(Mass mass, Mass total) {
    // The first place that reaches top_p of all; min-p may have left less than that.
    const auto numerator = static_cast<uint64_t>(static_cast<double>(options_.top_p) * 0x1p53);
    const Mass wanted = total - share_of(total, (uint64_t{1} << 53) - numerator);
    if (wanted >= mass) return mass;
    const Ranking::Place last = ranking_.find(candidates_, wanted > 0 ? wanted - 1 : 0);
    last_ = last.candidate;
    return last.through;
}

void Sampler::drop_rest() {
    if (!last_) return;
    std::erase_if(candidates_, [&](const Candidate& c) { return better(*last_, c); });
    last_.reset();
}

Mass Sampler::filter(int32_t best) {
    last_.reset();
    if (options_.temperature <= 0) {
        candidates_.assign(1, {best, 1.0f});
        return ranking_.count(candidates_);
    }
    gather(logits_[static_cast<size_t>(best)]);
    Mass total = 0;
    if (options_.min_p > 0) {  // the best candidate stands at 1 here
        total = mass_of(candidates_);
        std::erase_if(candidates_, [&](const Candidate& c) { return c.probability < options_.min_p; });
    }
    Mass mass = ranking_.count(candidates_);
    if (options_.top_p < 1) mass = keep_top_p(mass, options_.min_p > 0 ? total : mass);
    if (options_.xtc_probability > 0) {
        const double chance = static_cast<double>(uniform(counter_ + 1)) * 0x1p-53;
        if (chance < options_.xtc_probability) mass = exclude_top(mass);
    }
    return mass;
}

Mass Sampler::exclude_top(Mass mass) {
    drop_rest();
    const auto total = static_cast<double>(mass) * 0x1p-96;
    const auto reaches = [&](const Candidate& c) {
        return static_cast<float>(c.probability / total) >= options_.xtc_threshold;
    };
    const Candidate* least = nullptr;
    for (const Candidate& c : candidates_) {
        if (reaches(c) && (!least || better(*least, c))) least = &c;
    }
    if (!least) return mass;
    const int32_t kept = least->token;
    std::erase_if(candidates_, [&](const Candidate& c) { return reaches(c) && c.token != kept; });
    return ranking_.count(candidates_);
}

std::vector<Candidate> Sampler::distribution() {
    if (logits_.empty()) return {};
    check_numbers();
    const auto total = static_cast<double>(filter(largest())) * 0x1p-96;
    drop_rest();
    std::sort(candidates_.begin(), candidates_.end(), better);
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
    if (options_.temperature > 0 && options_.xtc_probability > 0) return "XTC";
    return nullptr;
}

Choice Sampler::choice() const {
    Choice choice{.vocabulary = options_.vocabulary};
    if (options_.temperature > 0) {
        choice.temperature = options_.temperature;
        choice.top_k = options_.top_k;
        choice.top_p = options_.top_p;
        choice.min_p = options_.min_p;
        choice.seed = options_.seed;
    }
    if (penalizes()) {
        choice.repetition_penalty = options_.repetition_penalty;
        choice.presence_penalty = options_.presence_penalty;
        choice.frequency_penalty = options_.frequency_penalty;
        choice.counts = &prompt_and_output_;
        choice.counted = accepted_;
    }
    if (!options_.logit_bias.empty()) choice.bias = &options_.logit_bias;
    if (choice.counts || choice.bias) choice.history = history_;
    if (!allowed_.empty()) choice.allowed = &allowed_;
    return choice;
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
        throw InvalidArgument(kNoneAllowed);
    }
    if (options_.temperature > 0) {
        const Mass mass = filter(token);
        token = ranking_.find(candidates_, share_of(mass, uniform(counter_))).candidate.token;
        counter_ += options_.xtc_probability > 0 ? 2 : 1;
    }
    ++prompt_and_output_[token];
    history_ = new_history();
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
