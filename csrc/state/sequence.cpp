#include "state/sequence.h"

#include <string>

#include "base/error.h"

namespace lily {

Sequence::Sequence(const StateLayout& layout)
    : layout_(layout), kv_(layout.kv), recurrent_(layout.recurrent) {}

Sequence::Sequence(const Prefix& prefix)
    : layout_{prefix.kv().layout(), prefix.recurrent()->layout()},
      tokens_(prefix.tokens()),
      kv_(prefix.kv()),
      recurrent_(*prefix.recurrent()),
      snapshots_{{prefix.length(), prefix.recurrent()}} {}

void Sequence::require_settled() const {
    if (unsettled_) {
        throw InvalidArgument("a step of this sequence failed half-way; truncate it before going on");
    }
}

void Sequence::reserve(int64_t rows) {
    require_settled();
    kv_.reserve(length(), length() + rows);
    unsettled_ = true;
}

std::unique_ptr<Sequence> Sequence::fork() const {
    settle();
    require_settled();
    auto copy = std::make_unique<Sequence>(layout_);
    copy->tokens_ = tokens_;
    copy->kv_ = kv_;
    copy->recurrent_ = RecurrentState(recurrent_);
    copy->snapshots_ = snapshots_;
    return copy;
}

void Sequence::snapshot() {
    settle();
    require_settled();
    if (length() > 0 && !snapshots_.contains(length())) {
        snapshots_.emplace(length(), std::make_shared<const RecurrentState>(recurrent_));
    }
}

int64_t Sequence::truncate(int64_t length) {
    settle();
    if (length >= this->length() && !unsettled_) return this->length();
    auto after = snapshots_.upper_bound(length);
    snapshots_.erase(after, snapshots_.end());
    const int64_t kept = snapshots_.empty() ? 0 : snapshots_.rbegin()->first;
    recurrent_ = kept == 0 ? RecurrentState(layout_.recurrent) : RecurrentState(*snapshots_.rbegin()->second);
    kv_.truncate(kept);
    tokens_.resize(static_cast<size_t>(kept));
    unsettled_ = false;
    return kept;
}

std::unique_ptr<Prefix> Sequence::prefix(int64_t length) const {
    settle();
    const auto found = snapshots_.find(length);
    if (found == snapshots_.end()) {
        throw InvalidArgument("no snapshot at " + std::to_string(length) + " tokens");
    }
    return std::make_unique<Prefix>(std::vector<int32_t>(tokens_.begin(), tokens_.begin() + length), kv_,
                                    found->second);
}

std::vector<int64_t> Sequence::snapshots() const {
    std::vector<int64_t> lengths{0};
    for (const auto& [length, state] : snapshots_) lengths.push_back(length);
    return lengths;
}

int64_t Sequence::bytes() const {
    return kv_.bytes() + layout_.recurrent.bytes() * static_cast<int64_t>(1 + snapshots_.size());
}

std::vector<MemoryBlock> Sequence::blocks() const {
    std::vector<MemoryBlock> result = kv_.blocks();
    result.emplace_back(reinterpret_cast<uint64_t>(this), layout_.recurrent.bytes());
    for (const auto& [length, state] : snapshots_) {
        result.emplace_back(reinterpret_cast<uint64_t>(state.get()), layout_.recurrent.bytes());
    }
    return result;
}

}  // namespace lily
