// One conversation's state. It covers exactly the tokens it lists; whoever advances it keeps that true.
//
// One thread at a time. fork() and snapshots share what is immutable.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "state/kv_cache.h"
#include "state/prefix.h"
#include "state/recurrent_state.h"

namespace lily {

struct StateLayout {
    KvLayout kv;
    RecurrentLayout recurrent;
};

class Sequence {
  public:
    // Someone who has begun a step beyond the listed tokens. It is asked to take that back before the states
    // are looked at or changed; `settle` comes from the sequence's user.
    class Ahead {
      public:
        virtual void settle(const Sequence& sequence) = 0;

      protected:
        ~Ahead() = default;
    };

    explicit Sequence(const StateLayout& layout);
    ~Sequence() { settle(); }
    Sequence(const Sequence&) = delete;
    Sequence& operator=(const Sequence&) = delete;
    // Continues from a prefix, which is also the first snapshot.
    explicit Sequence(const Prefix& prefix);

    int64_t length() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int32_t>& tokens() const { return tokens_; }

    // A second sequence with the same past.
    std::unique_ptr<Sequence> fork() const;
    // Remembers the recurrent state at the present length, so that truncate can come back here.
    void snapshot();
    // Goes back to the longest snapshot of at most `length` tokens (0 always exists); returns its length.
    // Nothing happens at the present length, unless a step failed half-way: then the last snapshot is taken.
    int64_t truncate(int64_t length);
    // The beginning up to a snapshot's length, for others to continue from.
    std::unique_ptr<Prefix> prefix(int64_t length) const;
    // Lengths that truncate can reach, ascending.
    std::vector<int64_t> snapshots() const;
    void drop_snapshot(int64_t length) { snapshots_.erase(length); }
    // Remembers a recurrent state of an earlier length, saved before.
    void add_snapshot(int64_t length, std::shared_ptr<const RecurrentState> state) {
        snapshots_.insert_or_assign(length, std::move(state));
    }
    int64_t bytes() const;
    // What it keeps alive; blocks shared with prefixes and other sequences have one address.
    std::vector<MemoryBlock> blocks() const;

    // The states cover the listed tokens and nothing more.
    void settle() const {
        if (Ahead* ahead = ahead_.load()) ahead->settle(*this);
    }
    void set_ahead(Ahead* ahead) { ahead_.store(ahead); }

    // For the runtime: a step makes room, the backend writes the states, then the tokens are listed. A step
    // that fails in between leaves states of an unknown mixture: the sequence then refuses to go on until
    // truncate() has brought back a snapshot.
    void reserve(int64_t rows);
    void require_settled() const;
    void commit(const int32_t* tokens, int64_t count) {
        tokens_.insert(tokens_.end(), tokens, tokens + count);
        unsettled_ = false;
    }
    // A step was given up: back to what was there before its reserve().
    void give_up(RecurrentState before) {
        recurrent_ = std::move(before);
        kv_.truncate(length());
        unsettled_ = false;
    }
    KvCache& kv() { return kv_; }
    RecurrentState& recurrent() { return recurrent_; }

  private:
    StateLayout layout_;
    std::vector<int32_t> tokens_;
    KvCache kv_;
    RecurrentState recurrent_;
    std::map<int64_t, std::shared_ptr<const RecurrentState>> snapshots_;
    bool unsettled_ = false;
    std::atomic<Ahead*> ahead_{nullptr};
};

}  // namespace lily
