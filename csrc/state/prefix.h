// An immutable beginning of a conversation, from which any number of sequences continue.
//
// Pages and recurrent state are shared with the sequence it was taken from, which copies before it writes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "state/kv_cache.h"
#include "state/recurrent_state.h"

namespace lily {

// One piece of shared memory: its address, which identifies it, and its bytes.
using MemoryBlock = std::pair<uint64_t, int64_t>;

class Prefix {
  public:
    Prefix(std::vector<int32_t> tokens, KvCache kv, std::shared_ptr<const RecurrentState> recurrent)
        : tokens_(std::move(tokens)), kv_(std::move(kv)), recurrent_(std::move(recurrent)) {
        kv_.truncate(length());
    }

    int64_t length() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int32_t>& tokens() const { return tokens_; }
    const KvCache& kv() const { return kv_; }
    const std::shared_ptr<const RecurrentState>& recurrent() const { return recurrent_; }

    // What it keeps alive; blocks that several prefixes or sequences share have one address.
    std::vector<MemoryBlock> blocks() const {
        std::vector<MemoryBlock> result = kv_.blocks();
        result.emplace_back(reinterpret_cast<uint64_t>(recurrent_.get()), recurrent_->layout().bytes());
        return result;
    }

  private:
    std::vector<int32_t> tokens_;
    KvCache kv_;
    std::shared_ptr<const RecurrentState> recurrent_;
};

}  // namespace lily
