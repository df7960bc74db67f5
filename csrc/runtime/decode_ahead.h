// A step ahead of the caller: while it deals with a token, the backend already computes what follows it.
//
// One sequence at a time, and only while nobody else wants the backend: several are better off in one pass.
// The step ahead is not part of the sequence; whatever is done with the sequence next, if it isn't the step
// that was foreseen, has it taken back first.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "backend/backend.h"
#include "runtime/scheduler.h"

namespace lily {

class DecodeAhead final : public Sequence::Ahead {
  public:
    // A sequence has at most `positions` positions.
    DecodeAhead(Backend& backend, std::span<const Op> ops, Scheduler& scheduler, int64_t positions)
        : backend_(backend), ops_(ops), scheduler_(scheduler), positions_(positions) {}
    ~DecodeAhead();
    DecodeAhead(const DecodeAhead&) = delete;
    DecodeAhead& operator=(const DecodeAhead&) = delete;

    // Feeds `token` and returns the one chosen after it; nothing if the backend isn't free for this.
    std::optional<int32_t> step(Sequence& sequence, int32_t token, const Choice& choice);
    void settle(const Sequence& sequence) override;

  private:
    void begin(Sequence& sequence, int32_t token, const Choice& choice);
    int32_t advance(int32_t token);
    void end();

    Backend& backend_;
    std::span<const Op> ops_;
    Scheduler& scheduler_;
    int64_t positions_;
    // Touched by whoever has the backend.
    Sequence* sequence_ = nullptr;
    std::unique_ptr<Decoder> decoder_;
    Choice choice_;
    int32_t foreseen_ = -1;  // the token that the step under way feeds
    bool under_way_ = false;
};

}  // namespace lily
