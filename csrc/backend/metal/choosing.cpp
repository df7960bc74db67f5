#include "backend/metal/choosing.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lily::metal {
namespace {

enum Adjust : uint32_t { kPenalties = 1, kBias = 2, kMask = 4 };  // of metal/sample.metal

size_t mask_words(size_t vocabulary) { return (vocabulary + 31) / 32; }

}  // namespace

SampleOptions sample_options(const Choice& choice) {
    SampleOptions options;
    options.temperature = choice.temperature;
    options.top_k = static_cast<uint32_t>(choice.top_k);
    options.top_p = choice.top_p;
    options.min_p = choice.min_p;
    options.seed_low = static_cast<uint32_t>(choice.seed);
    options.seed_high = static_cast<uint32_t>(choice.seed >> 32);
    options.adjust =
        (choice.counts ? kPenalties : 0u) | (choice.bias ? kBias : 0u) | (choice.allowed ? kMask : 0u);
    options.repetition = choice.repetition_penalty;
    options.presence = choice.presence_penalty;
    options.frequency = choice.frequency_penalty;
    return options;
}

int32_t chosen_token(uint32_t token, uint32_t key) {
    if (key == kNotANumber)
        throw BackendError("the model produced logits that are not numbers; the weights are damaged");
    return key == kNoneAllowed ? kNoToken : static_cast<int32_t>(token);
}

Adjustments::Slot::~Slot() {
    if (owner_) owner_->slots_[at_] = {};
}

void Adjustments::Slot::keep(int64_t tokens) {
    Held& slot = std::exchange(owner_, nullptr)->slots_[at_];
    slot.counted += tokens;
    slot.taken = false;
}

Adjustments::Slot Adjustments::take(const Choice& choice, uint32_t vocabulary) {
    if (vocabulary != vocabulary_) {
        if (std::ranges::any_of(slots_, &Held::taken))
            throw BackendError("choices among different vocabularies can't be made at a time");
        slots_.clear();
        vocabulary_ = vocabulary;
    }
    ++calls_;
    const size_t at = find(choice);
    Held& slot = slots_[at];
    const bool known =
        choice.history != 0 && slot.history == choice.history && slot.counted == choice.counted;
    if (!known) write(choice, at);
    if (choice.allowed) {
        const size_t words = mask_words(vocabulary_);
        auto* mask = masks_.as<uint32_t>() + at * words;
        const size_t given = std::min(words, choice.allowed->size());
        std::copy_n(choice.allowed->begin(), given, mask);
        std::fill(mask + given, mask + words, 0u);
    }
    slot = {choice.history, choice.counted, calls_, true};
    return {*this, at};
}

// The slot that has the history, else the one that wasn't used for longest.
size_t Adjustments::find(const Choice& choice) {
    const Held* best = nullptr;
    for (const Held& slot : slots_) {
        if (slot.taken) continue;
        if (choice.history != 0 && slot.history == choice.history) {
            best = &slot;
            break;
        }
        if (!best || slot.used < best->used) best = &slot;
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
        if (&slots_[i] == best) return i;
    }
    grow();
    return find(choice);
}

void Adjustments::grow() {
    const size_t before = slots_.size(), slots = std::max<size_t>(4, 2 * before);
    stream_.wait_idle();  // the tables move
    const auto larger = [&](DeviceBuffer& table, size_t numbers, const char* label) {
        DeviceBuffer buffer = device_.allocate(4 * slots * numbers, label);
        if (before > 0) std::memcpy(buffer.contents(), table.contents(), 4 * before * numbers);
        return buffer;
    };
    DeviceBuffer counts = larger(counts_, vocabulary_, "counts of tokens");
    DeviceBuffer bias = larger(bias_, vocabulary_, "bias of tokens");
    masks_ = larger(masks_, mask_words(vocabulary_), "masks of tokens");
    counts_ = std::move(counts);
    bias_ = std::move(bias);
    slots_.resize(slots);
}

void Adjustments::write(const Choice& choice, size_t at) {
    const size_t first = at * vocabulary_;
    const auto inside = [&](int32_t token) {
        return token >= 0 && static_cast<uint32_t>(token) < vocabulary_;
    };
    if (choice.counts) {
        auto* counts = counts_.as<uint32_t>() + first;
        std::fill_n(counts, vocabulary_, 0u);
        for (const auto& [token, count] : *choice.counts) {
            if (inside(token)) counts[token] = static_cast<uint32_t>(count);
        }
    }
    if (choice.bias) {
        auto* bias = bias_.as<float>() + first;
        std::fill_n(bias, vocabulary_, 0.0f);
        for (const auto& [token, value] : *choice.bias) {
            if (inside(token)) bias[token] += value;
        }
    }
}

Chosen::Adjusted Adjustments::tables(const Range& slots) const { return {slots, counts_, bias_, masks_}; }

}  // namespace lily::metal
