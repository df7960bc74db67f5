#include "runtime/model.h"

#include <algorithm>
#include <mutex>

#include "backend/cpu/cpu_backend.h"
#include "base/error.h"

namespace lily {
namespace {

std::unique_ptr<Backend> make_backend(const ModelOptions& options) {
    if (options.backend == "cpu") return cpu::make_cpu_backend(options.backend_options);
    throw BackendError("this build has no backend named '" + options.backend + "' (available: cpu)");
}

}  // namespace

Model::Model(const ModelConfig& config, std::shared_ptr<WeightStore> weights, const ModelOptions& options)
    : config_(config),
      options_(options),
      weights_(std::move(weights)),
      graph_(ModelGraph::build(config, *weights_, options.kv_dtype)),
      backend_(make_backend(options)) {
    if (options.chunk < 1)
        throw InvalidArgument("chunk must be at least 1, got " + std::to_string(options.chunk));
    static std::atomic<uint64_t> models{0};
    graph_.state.kv.owner = ++models;
    backend_->prepare(graph_.activation_widths, options.chunk);
}

void Model::check_owner(Sequence& sequence) const {
    if (sequence.kv().layout().owner != graph_.state.kv.owner) {
        throw InvalidArgument(
            "the sequence belongs to another model; make one with this model's new_sequence()");
    }
}

void Model::check_token(int32_t token) const {
    if (token < 0 || token >= config_.vocab_size) {
        throw InvalidArgument("token id " + std::to_string(token) + " is outside the vocabulary (0 to " +
                              std::to_string(config_.vocab_size - 1) + ")");
    }
}

void Model::check_room(const Sequence& sequence, int64_t count) const {
    if (sequence.length() + count > config_.max_position_embeddings) {
        throw InvalidArgument("the context would hold " + std::to_string(sequence.length() + count) +
                              " tokens, the model takes " + std::to_string(config_.max_position_embeddings));
    }
}

int64_t Model::forward(Sequence& sequence, std::span<const int32_t> tokens, LogitsOf wanted, float* logits,
                       const CancelToken* cancel, const std::function<void(int64_t, int64_t)>& progress) {
    const auto total = static_cast<int64_t>(tokens.size());
    if (total == 0) throw InvalidArgument("no tokens to feed");
    check_owner(sequence);
    for (const int32_t token : tokens) check_token(token);
    check_room(sequence, total);
    int64_t done = 0;
    while (done < total) {
        if (cancel && cancel->cancelled()) return done;
        const int64_t rows = std::min(options_.chunk, total - done);
        Batch batch;
        batch.tokens.assign(tokens.begin() + done, tokens.begin() + done + rows);
        batch.segments = {{&sequence, 0, rows}};
        if (wanted == LogitsOf::all) {
            for (int64_t row = 0; row < rows; ++row) batch.logit_rows.push_back(static_cast<int32_t>(row));
            batch.logits = logits + done * config_.vocab_size;
        } else if (done + rows == total) {
            batch.logit_rows = {static_cast<int32_t>(rows - 1)};
            batch.logits = logits;
        }
        {
            const std::lock_guard lock(mutex_);
            sequence.reserve(rows);
            backend_->run(graph_.trunk, batch);
            sequence.commit(batch.tokens.data(), rows);
        }
        done += rows;
        if (progress) progress(done, total);
    }
    return done;
}

void Model::forward_each(std::span<Sequence* const> sequences, std::span<const int32_t> tokens,
                         float* logits) {
    if (sequences.empty() || sequences.size() != tokens.size()) {
        throw InvalidArgument("forward_each needs one token for each sequence");
    }
    if (static_cast<int64_t>(sequences.size()) > options_.chunk) {
        throw InvalidArgument("at most " + std::to_string(options_.chunk) + " sequences fit into one step");
    }
    Batch batch;
    batch.tokens.assign(tokens.begin(), tokens.end());
    batch.logits = logits;
    for (size_t i = 0; i < sequences.size(); ++i) {
        check_owner(*sequences[i]);
        check_token(tokens[i]);
        check_room(*sequences[i], 1);
        for (size_t j = 0; j < i; ++j) {
            if (sequences[j] == sequences[i])
                throw InvalidArgument("a sequence may appear only once in a step");
        }
        batch.segments.push_back({sequences[i], static_cast<int64_t>(i), 1});
        batch.logit_rows.push_back(static_cast<int32_t>(i));
    }
    const std::lock_guard lock(mutex_);
    for (Sequence* sequence : sequences) sequence->reserve(1);
    backend_->run(graph_.trunk, batch);
    for (size_t i = 0; i < sequences.size(); ++i) sequences[i]->commit(&batch.tokens[i], 1);
}

int32_t Model::step(Sequence& sequence, int32_t token, Sampler& sampler) {
    sampler.ensure_logits(config_.vocab_size);
    forward(sequence, {&token, 1}, LogitsOf::last, sampler.logits().data(), nullptr, nullptr);
    return sampler.draw();
}

}  // namespace lily
