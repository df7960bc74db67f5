// Joins the work of concurrent callers into passes over the weights (continuous batching).
//
// There is no thread of its own: a caller that finds nobody computing leads the next pass, with rows of
// everyone who waits; the others sleep until their rows are done. A caller alone pays for two uncontended
// locks. Rows of a pass don't influence each other, so everyone gets the bits it would get alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"

namespace lily {

// What a caller wants computed: tokens that continue a sequence.
struct Job {
    Sequence* sequence;
    std::span<const int32_t> tokens;
    float* logits;     // of the last token [vocab], or of all [tokens, vocab]; written with their rows
    bool all = false;  // logits of all tokens
    const std::function<bool()>* stop = nullptr;  // true gives up a pass that nobody else takes part in
    int64_t rows = 0;                             // out: so many of the tokens were computed
    const Choice* choice = nullptr;               // instead of logits: the token after the last one is chosen
    int32_t chosen = -1;                          // out
    Tape* tape = nullptr;  // the tokens are one and drafts after it: it alone is listed
    struct Call* call = nullptr;
};

class Scheduler {
  public:
    // A pass has at most `max_rows` rows.
    Scheduler(Backend& backend, std::span<const Op> ops, int64_t vocab, int64_t max_rows)
        : backend_(backend), ops_(ops), vocab_(vocab), max_rows_(max_rows) {
        taken_.reserve(static_cast<size_t>(max_rows));
    }

    // Returns when each job has been part of a pass: with at least one row, with all of them if there was
    // room; without any if it was given up. Throws what went wrong with one of these jobs.
    void run(std::span<Job> jobs);

    // Runs `work` with the backend for itself. `exclusive` waits for that; `alone` doesn't run it, and
    // returns false, if anybody else wants a pass or has joined.
    void exclusive(const std::function<void()>& work);
    bool alone(const Sequence& sequence, const std::function<void()>& work);

    // Between join and leave a sequence may be expected back soon after a pass, and the next pass then waits
    // for it a little: if it was quick the last time, and if it has ever come while another caller was at
    // work. One thread that advances several sequences in turns waits for nothing.
    void join(const Sequence& sequence);
    void leave(const Sequence& sequence);

    // Passes so far, and sequences that have joined.
    int64_t passes();
    int64_t members();

  private:
    using Clock = std::chrono::steady_clock;
    struct Member {
        bool awaited = false;
        bool quick = true;  // came back soon the last time
        bool concurrent =
            false;  // came while another caller was at work, and wasn't waited for in vain since
        Clock::time_point ended{};    // its last pass
        Clock::time_point decoded{};  // its last pass with a single row
    };

    void lead(std::unique_lock<std::mutex>& lock, const std::function<void()>& work);
    void hand_on();
    void arrive(const Sequence* sequence);
    void gather(std::unique_lock<std::mutex>& lock);
    void pass(std::unique_lock<std::mutex>& lock);
    void take();
    void compute(std::span<Job* const> jobs);
    void copy_logits(std::span<Job* const> jobs, const Batch& batch) const;
    bool someone_decodes(Clock::time_point now) const;

    Backend& backend_;
    std::span<const Op> ops_;
    int64_t vocab_;
    int64_t max_rows_;

    std::mutex mutex_;
    std::condition_variable gathered_;
    std::condition_variable free_;  // nobody leads
    std::deque<Job*> queue_;
    std::unordered_map<const Sequence*, Member> members_;
    int64_t awaited_ = 0;
    int64_t passes_ = 0;
    bool leading_ = false;
    Clock::time_point passed_{};
    Clock::duration patience_{};
    std::vector<Job*> taken_;    // into the pass; the leader's
    std::vector<float> logits_;  // of a pass with several jobs; the leader's
};

}  // namespace lily
