#include "state/sequence.h"

namespace lily {

Sequence::Sequence(const StateLayout& layout)
    : layout_(layout), kv_(layout.kv), recurrent_(layout.recurrent) {}

std::unique_ptr<Sequence> Sequence::fork() const {
    auto copy = std::make_unique<Sequence>(layout_);
    copy->tokens_ = tokens_;
    copy->kv_ = kv_;
    copy->recurrent_ = RecurrentState(recurrent_);
    copy->snapshots_ = snapshots_;
    return copy;
}

void Sequence::snapshot() {
    if (length() > 0 && !snapshots_.contains(length())) {
        snapshots_.emplace(length(), std::make_shared<const RecurrentState>(recurrent_));
    }
}

int64_t Sequence::truncate(int64_t length) {
    if (length >= this->length()) return this->length();
    auto after = snapshots_.upper_bound(length);
    snapshots_.erase(after, snapshots_.end());
    const int64_t kept = snapshots_.empty() ? 0 : snapshots_.rbegin()->first;
    recurrent_ = kept == 0 ? RecurrentState(layout_.recurrent) : RecurrentState(*snapshots_.rbegin()->second);
    kv_.truncate(kept);
    tokens_.resize(static_cast<size_t>(kept));
    return kept;
}

std::vector<int64_t> Sequence::snapshots() const {
    std::vector<int64_t> lengths{0};
    for (const auto& [length, state] : snapshots_) lengths.push_back(length);
    return lengths;
}

int64_t Sequence::bytes() const {
    return kv_.bytes() + layout_.recurrent.bytes() * static_cast<int64_t>(1 + snapshots_.size());
}

}  // namespace lily
