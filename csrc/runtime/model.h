// A loaded model: weights, graph and backend, and the ways to advance sequences with them.
//
// Any thread may call; steps and chunks of prompts that are asked for at the same time are computed together
// (runtime/scheduler.h). A sequence belongs to one caller at a time.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "graph/model_graph.h"
#include "runtime/decode_ahead.h"
#include "runtime/sampler.h"
#include "runtime/scheduler.h"
#include "runtime/verifier.h"

namespace lily {

struct ModelOptions {
    std::string backend = "cpu";
    BackendOptions backend_options;
    KvDtype kv_dtype = KvDtype::bf16;
    std::optional<int64_t> chunk;  // rows of a prompt computed together; by default what suits the backend
};

// Stops work in progress, from any thread.
class CancelToken {
  public:
    void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  private:
    std::atomic<bool> cancelled_{false};
};

enum class LogitsOf { last, all };

// Names of the backends in this build, best first.
std::vector<std::string> backends();
// Why one of them can't be used on this machine, or "".
std::string backend_problem(const std::string& name);

// Compiles every kernel that backends of this build compile at run time: (family, kernels, problem or "").
std::vector<std::tuple<std::string, size_t, std::string>> compile_kernels();

class Model {
  public:
    Model(const ModelConfig& config, std::shared_ptr<WeightStore> weights, const ModelOptions& options);

    std::unique_ptr<Sequence> new_sequence() const { return std::make_unique<Sequence>(graph_.state); }

    // Feeds `tokens` and writes the logits of the last (or every) token: [count, vocab]. Returns the tokens
    // fed: fewer than given when `stop` said so, which is asked many times a chunk; the sequence then ends
    // with the last whole chunk. `progress(done, total)` after each chunk. Both may be empty.
    int64_t forward(Sequence& sequence, std::span<const int32_t> tokens, LogitsOf wanted, float* logits,
                    const std::function<bool()>& stop, const std::function<void(int64_t, int64_t)>& progress);

    // One token for each of several sequences in one pass; logits [sequences, vocab].
    void forward_each(std::span<Sequence* const> sequences, std::span<const int32_t> tokens, float* logits);

    // Feeds one token and draws the next one. `drafts`, tokens that may follow, are computed in the same
    // pass; steps that feed them next compute nothing. No other use of the sequence sees them.
    int32_t step(Sequence& sequence, int32_t token, Sampler& sampler, std::span<const int32_t> drafts = {});
    // The same for a caller that draws by itself: writes the logits [vocab].
    void step_logits(Sequence& sequence, int32_t token, std::span<const int32_t> drafts, float* logits);
    // The same for several sequences in one pass, each with its own sampler.
    std::vector<int32_t> step_each(std::span<Sequence* const> sequences, std::span<const int32_t> tokens,
                                   std::span<Sampler* const> samplers);

    // States of the multi-token prediction head.
    std::unique_ptr<Sequence> new_head_sequence() const {
        return std::make_unique<Sequence>(graph_.mtp_state);
    }
    // Feeds `tokens` to the model, and to the head `next`, the token after each of them, beside the model's
    // hidden rows; writes the head's logits after each [next, vocab]. Without `tokens` the head takes its own
    // last hidden rows of the call before, which nothing may have come after.
    void draft(Sequence& sequence, Sequence& head, std::span<const int32_t> tokens,
               std::span<const int32_t> next, float* logits);

    // Feeds one token operation by operation: names and results, as far as backends share their form.
    std::vector<std::pair<std::string, std::vector<float>>> trace(Sequence& sequence, int32_t token);

    // Announce that a sequence will be advanced again and again, and that it won't be any more: others' steps
    // wait a moment for it in between.
    void join(const Sequence& sequence) { scheduler_.join(sequence); }
    void leave(const Sequence& sequence) {
        sequence.settle();
        scheduler_.leave(sequence);
    }

    // Tokens drawn in steps so far, by where and why: "backend", or the reason why the host had to, as
    // "host: penalties".
    std::map<std::string, int64_t> draws() const;

    // Whether steps may have drafts; without it they are a BackendError.
    bool can_verify() const { return backend_->new_tape() != nullptr; }

    // Sequences between join and leave.
    int64_t joined() { return scheduler_.members(); }

    // Passes over the weights so far.
    int64_t passes() { return scheduler_.passes(); }

    const ModelConfig& config() const { return config_; }
    const StateLayout& state_layout() const { return graph_.state; }
    bool has_mtp() const { return !graph_.mtp.empty(); }
    std::string describe() const { return backend_->describe(); }
    // What the backend has done so far.
    std::map<std::string, uint64_t> counts() {
        std::map<std::string, uint64_t> counts;
        scheduler_.exclusive([&] { counts = backend_->counts(); });
        return counts;
    }
    std::map<std::string, uint64_t> memory() const { return backend_->memory(); }
    int64_t weight_bytes() const { return weights_->bytes(); }
    int64_t op_count() const { return static_cast<int64_t>(graph_.trunk.size()); }
    std::vector<std::string> unused_weights() const { return weights_->unused(); }
    int64_t chunk() const { return chunk_; }

  private:
    void run_each(std::span<Sequence* const> sequences, std::span<Job> jobs);
    // Why the host draws this sampler's tokens, or null.
    const char* host_reason(const Sampler& sampler) const;
    void count_draw(const char* host_reason);
    void check_owner(Sequence& sequence) const;
    void check_token(int32_t token) const;
    void check_room(const Sequence& sequence, int64_t count) const;
    const float* verify(Sequence& sequence, int32_t token, std::span<const int32_t> drafts);

    ModelConfig config_;
    ModelOptions options_;
    std::shared_ptr<WeightStore> weights_;
    ModelGraph graph_;
    std::unique_ptr<Backend> backend_;
    int64_t chunk_;  // most rows of a pass
    Scheduler scheduler_;
    int64_t hidden_rows_ = 0;  // that the last draft() left
    DecodeAhead ahead_;
    Verifier verifier_;
    mutable std::mutex draws_mutex_;
    std::map<std::string, int64_t> draws_;
};

}  // namespace lily
