// Verification of drafts: tokens that may follow are computed in one pass with the next token, and give the
// logits that steps of their own would.
//
// A row becomes part of its sequence when its token is fed. The other rows are no part of it: their recurrent
// updates are on a tape, not applied, and whatever else is done with the sequence has them taken back first.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "runtime/scheduler.h"

namespace lily {

class Verifier final : public Sequence::Ahead {
  public:
    Verifier(Backend& backend, std::span<const Op> ops, Scheduler& scheduler, int64_t vocab)
        : backend_(backend), ops_(ops), scheduler_(scheduler), vocab_(vocab) {}
    ~Verifier();
    Verifier(const Verifier&) = delete;
    Verifier& operator=(const Verifier&) = delete;

    // Feeds `token`; returns the logits [vocab] after it, until the next call for this sequence. Nothing is
    // computed, and drafts are ignored, if it is the next of the drafts computed before. Null, and nothing is
    // fed, if it isn't and there are no drafts. BackendError if the backend has no tapes.
    const float* step(Sequence& sequence, int32_t token, std::span<const int32_t> drafts);
    void settle(const Sequence& sequence) override;

  private:
    struct Rows {
        Sequence* sequence = nullptr;
        std::unique_ptr<Tape> tape;
        std::vector<int32_t> tokens;
        std::vector<float> logits;  // [tokens, vocab]
        int64_t listed = 0;         // so many of the tokens are part of the sequence
    };

    const float* take(const Sequence& sequence, int32_t token);
    const float* compute(Sequence& sequence, int32_t token, std::span<const int32_t> drafts);
    std::unique_ptr<Rows> make_rows();
    std::unique_ptr<Rows> release(const Sequence& sequence);

    Backend& backend_;
    std::span<const Op> ops_;
    Scheduler& scheduler_;
    int64_t vocab_;
    std::mutex mutex_;
    std::unordered_map<const Sequence*, std::unique_ptr<Rows>> rows_;
    std::unique_ptr<Rows> spare_;  // the last one's memory, for the next
};

}  // namespace lily
