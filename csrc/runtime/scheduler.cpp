#include "runtime/scheduler.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace lily {

// One caller's jobs on its stack.
struct Call {
    size_t left;
    std::exception_ptr error;
    std::condition_variable wake;  // all done, or its turn to lead
};

namespace {

using namespace std::chrono_literals;

// Rows of prompts in a pass while others decode: they wait for no more than this between two tokens.
constexpr int64_t kSharedRows = 64;
// Someone who decoded this long ago may still be decoding, for a reader that takes its time.
constexpr auto kDecodingFor = 2s;
// How long a pass waits for those who are expected: what the last one took, for a wait in vain then costs no
// more than a pass of their own would; a small model doesn't wait for threads to wake up.
constexpr auto kMostPatience = 10ms;

// Rows of a job, among those in this pass, whose logits are wanted: the last of them.
int64_t logit_rows(const Job& job) {
    if (job.choice) return 0;
    if (job.all) return job.rows;
    return job.rows == static_cast<int64_t>(job.tokens.size()) ? 1 : 0;
}

}  // namespace

void Scheduler::run(std::span<Job> jobs) {
    Call call{jobs.size(), nullptr, {}};
    std::unique_lock lock(mutex_);
    for (Job& job : jobs) {
        job.call = &call;
        job.rows = 0;
        queue_.push_back(&job);
        arrive(job.sequence);
    }
    while (call.left > 0) {
        if (leading_) {
            call.wake.wait(lock);
            continue;
        }
        leading_ = true;
        gather(lock);
        pass(lock);
        hand_on();
    }
    if (call.error) std::rethrow_exception(call.error);
}

void Scheduler::hand_on() {
    leading_ = false;
    if (!queue_.empty()) queue_.front()->call->wake.notify_one();
    free_.notify_one();
}

void Scheduler::lead(std::unique_lock<std::mutex>& lock, const std::function<void()>& work) {
    leading_ = true;
    lock.unlock();
    try {
        work();
    } catch (...) {
        lock.lock();
        hand_on();
        throw;
    }
    lock.lock();
    hand_on();
}

void Scheduler::exclusive(const std::function<void()>& work) {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [&] { return !leading_; });
    lead(lock, work);
}

bool Scheduler::alone(const Sequence& sequence, const std::function<void()>& work) {
    std::unique_lock lock(mutex_);
    const bool member = members_.contains(&sequence);
    if (leading_ || !queue_.empty() || members_.size() > (member ? 1u : 0u)) return false;
    lead(lock, work);
    ++passes_;
    const auto found = members_.find(&sequence);
    if (found != members_.end()) found->second.ended = found->second.decoded = Clock::now();
    return true;
}

void Scheduler::join(const Sequence& sequence) {
    const std::lock_guard lock(mutex_);
    members_.try_emplace(&sequence);
}

void Scheduler::leave(const Sequence& sequence) {
    const std::lock_guard lock(mutex_);
    const auto found = members_.find(&sequence);
    if (found == members_.end()) return;
    if (found->second.awaited && --awaited_ == 0) gathered_.notify_one();
    members_.erase(found);
}

int64_t Scheduler::passes() {
    const std::lock_guard lock(mutex_);
    return passes_;
}

int64_t Scheduler::members() {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(members_.size());
}

void Scheduler::arrive(const Sequence* sequence) {
    const auto found = members_.find(sequence);
    if (found == members_.end()) return;
    Member& member = found->second;
    member.concurrent = member.concurrent || leading_;
    member.quick = member.ended == Clock::time_point{} || Clock::now() - member.ended <= patience_;
    if (!member.awaited) return;
    member.awaited = false;
    if (--awaited_ == 0) gathered_.notify_one();
}

void Scheduler::gather(std::unique_lock<std::mutex>& lock) {
    const auto enough = [&] { return awaited_ == 0 || static_cast<int64_t>(queue_.size()) >= max_rows_; };
    if (gathered_.wait_until(lock, passed_ + patience_, enough)) return;
    for (auto& [sequence, member] : members_) {
        if (!member.awaited) continue;
        member.awaited = member.concurrent = false;
    }
    awaited_ = 0;
}

bool Scheduler::someone_decodes(Clock::time_point now) const {
    return std::any_of(members_.begin(), members_.end(),
                       [&](const auto& entry) { return now - entry.second.decoded < kDecodingFor; });
}

// The first in the queue, each with at least one row; prompts share what the limit leaves.
void Scheduler::take() {
    const auto count = std::min<int64_t>(max_rows_, static_cast<int64_t>(queue_.size()));
    taken_.assign(queue_.begin(), queue_.begin() + count);
    const int64_t single =
        std::count_if(taken_.begin(), taken_.end(), [](const Job* job) { return job->tokens.size() == 1; });
    int64_t prompts = count - single;
    const bool shared = prompts > 0 && (single > 0 || someone_decodes(Clock::now()));
    int64_t room = std::max(prompts, std::min(shared ? kSharedRows : max_rows_, max_rows_ - single));
    for (Job* job : taken_) {
        const auto size = static_cast<int64_t>(job->tokens.size());
        job->rows = size == 1 ? 1 : std::min(size, room / prompts);
        if (size == 1) continue;
        room -= job->rows;
        --prompts;
    }
    queue_.erase(queue_.begin(), queue_.begin() + count);
}

void Scheduler::pass(std::unique_lock<std::mutex>& lock) {
    const auto begun = Clock::now();
    take();
    lock.unlock();
    compute(taken_);
    lock.lock();
    ++passes_;
    passed_ = Clock::now();
    patience_ = std::min<Clock::duration>(passed_ - begun, kMostPatience);
    for (Job* job : taken_) {
        const auto found = members_.find(job->sequence);
        if (found != members_.end()) {
            Member& member = found->second;
            member.ended = passed_;
            if (job->tokens.size() == 1 || job->tape) member.decoded = passed_;
            if (member.quick && member.concurrent && !member.awaited) {
                member.awaited = true;
                ++awaited_;
            }
        }
        if (--job->call->left == 0) job->call->wake.notify_one();
    }
}

// Never throws: what goes wrong is told to those whom it concerns.
void Scheduler::compute(std::span<Job* const> jobs) {
    std::vector<Job*> running;
    try {
        Batch batch;
        running.reserve(jobs.size());
        for (Job* job : jobs) {
            try {
                job->sequence->reserve(job->rows);
            } catch (...) {
                job->call->error = std::current_exception();
                continue;
            }
            running.push_back(job);
        }
        int64_t rows = 0;
        for (Job* job : running) {
            batch.tokens.insert(batch.tokens.end(), job->tokens.begin(), job->tokens.begin() + job->rows);
            batch.segments.push_back({job->sequence, rows, job->rows, job->tape});
            rows += job->rows;
            if (job->choice && job->rows == static_cast<int64_t>(job->tokens.size())) {
                batch.chosen_rows.push_back({static_cast<int32_t>(rows - 1), job->choice, &job->chosen});
            }
            for (int64_t left = logit_rows(*job); left > 0; --left) {
                batch.logit_rows.push_back(static_cast<int32_t>(rows - left));
            }
        }
        if (running.empty()) return;
        std::optional<RecurrentState> before;
        if (running.size() == 1) {
            batch.logits = running.front()->logits;
            // One row is over before anyone could want to stop it.
            if (rows > 1) batch.stop = running.front()->stop;
            if (batch.stop) before.emplace(running.front()->sequence->recurrent());
        } else {
            logits_.resize(batch.logit_rows.size() * static_cast<size_t>(vocab_));
            batch.logits = logits_.data();
        }
        if (!backend_.run(ops_, batch)) {
            running.front()->sequence->give_up(std::move(*before));
            running.front()->rows = 0;
            return;
        }
        for (Job* job : running) job->sequence->commit(job->tokens.data(), job->tape ? 1 : job->rows);
        if (running.size() > 1) copy_logits(running, batch);
    } catch (...) {
        for (Job* job : jobs) {
            if (!job->call->error) job->call->error = std::current_exception();
        }
    }
}

void Scheduler::copy_logits(std::span<Job* const> jobs, const Batch& batch) const {
    const float* from = batch.logits;
    for (Job* job : jobs) {
        const int64_t count = logit_rows(*job) * vocab_;
        std::copy(from, from + count, job->logits);
        from += count;
    }
}

}  // namespace lily
