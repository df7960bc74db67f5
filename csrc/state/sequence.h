// One conversation's state. It covers exactly the tokens it lists; whoever advances it keeps that true.
//
// One thread at a time. fork() and snapshots share what is immutable.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "state/kv_cache.h"
#include "state/recurrent_state.h"

namespace lily {

struct StateLayout {
    KvLayout kv;
    RecurrentLayout recurrent;
};

class Sequence {
  public:
    explicit Sequence(const StateLayout& layout);

    int64_t length() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int32_t>& tokens() const { return tokens_; }

    // A second sequence with the same past.
    std::unique_ptr<Sequence> fork() const;
    // Remembers the recurrent state at the present length, so that truncate can come back here.
    void snapshot();
    // Goes back to the longest snapshot of at most `length` tokens (0 always exists); returns its length.
    int64_t truncate(int64_t length);
    // Lengths that truncate can reach, ascending.
    std::vector<int64_t> snapshots() const;
    void drop_snapshot(int64_t length) { snapshots_.erase(length); }
    int64_t bytes() const;

    // For the runtime: a step makes room, the backend writes the states, then the tokens are listed.
    void reserve(int64_t rows) { kv_.reserve(length(), length() + rows); }
    void commit(const int32_t* tokens, int64_t count) {
        tokens_.insert(tokens_.end(), tokens, tokens + count);
    }
    KvCache& kv() { return kv_; }
    RecurrentState& recurrent() { return recurrent_; }

  private:
    StateLayout layout_;
    std::vector<int32_t> tokens_;
    KvCache kv_;
    RecurrentState recurrent_;
    std::map<int64_t, std::shared_ptr<const RecurrentState>> snapshots_;
};

}  // namespace lily
