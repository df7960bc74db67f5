#include "runtime/model.h"

#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#ifdef LILY_METAL
#include "backend/metal/device.h"
#include "backend/metal/metal_backend.h"
#endif
#include "base/error.h"

namespace lily {
namespace {

std::unique_ptr<Backend> make_backend(const ModelOptions& options) {
    if (options.backend == "cpu") return cpu::make_cpu_backend(options.backend_options);
#ifdef LILY_METAL
    if (options.backend == "metal") return metal::make_metal_backend(options.backend_options);
#endif
    std::string names;
    for (const std::string& name : backends()) names += (names.empty() ? "" : ", ") + name;
    throw BackendError("this build has no backend named '" + options.backend + "' (it has " + names + ")");
}

ModelOptions checked(const ModelOptions& options) {
    if (options.chunk && *options.chunk < 1)
        throw InvalidArgument("chunk must be at least 1, got " + std::to_string(*options.chunk));
    return options;
}

// Routed and shared experts of unequal width leave numbers of their slots unwritten.
void clear_padding(const ExpertShape& shape, std::vector<float>& slots) {
    const int64_t stride = std::max(shape.width, shape.shared_width);
    for (int64_t slot = 0; slot < shape.slots(); ++slot) {
        const int64_t width = slot < shape.top_k ? shape.width : shape.shared_width;
        std::fill(slots.begin() + slot * stride + width, slots.begin() + (slot + 1) * stride, 0.0f);
    }
}

}  // namespace

std::vector<std::string> backends() {
#ifdef LILY_METAL
    return {"metal", "cpu"};
#else
    return {"cpu"};
#endif
}

std::string backend_problem([[maybe_unused]] const std::string& name) {
#ifdef LILY_METAL
    if (name == "metal") return metal::unavailable_reason();
#endif
    return "";
}

std::vector<std::tuple<std::string, size_t, std::string>> compile_kernels() {
    std::vector<std::tuple<std::string, size_t, std::string>> result;
#ifdef LILY_METAL
    for (const auto& [family, kernels, problem] : metal::compile_kernels()) {
        result.emplace_back(family, kernels, problem);
    }
#endif
    return result;
}

Model::Model(const ModelConfig& config, std::shared_ptr<WeightStore> weights, const ModelOptions& options)
    : config_(config),
      options_(checked(options)),
      weights_(std::move(weights)),
      graph_(ModelGraph::build(config, *weights_, options.kv_dtype)),
      backend_(make_backend(options)),
      chunk_(options.chunk.value_or(backend_->chunk())),
      scheduler_(*backend_, graph_.trunk, config.vocab_size, chunk_),
      ahead_(*backend_, graph_.trunk, scheduler_, config.max_position_embeddings),
      verifier_(*backend_, graph_.trunk, scheduler_, config.vocab_size) {
    static std::atomic<uint64_t> models{0};
    graph_.state.kv.owner = ++models;
    backend_->place(graph_.state);
    Plan plan{
        {graph_.trunk}, {&graph_.state}, graph_.activation_widths, chunk_, config.max_position_embeddings};
    if (has_mtp()) {
        graph_.mtp_state.kv.owner = ++models;
        backend_->place(graph_.mtp_state);
        plan.lists.emplace_back(graph_.mtp);
        plan.layouts.push_back(&graph_.mtp_state);
    }
    backend_->prepare(plan);
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
                       const std::function<bool()>& stop,
                       const std::function<void(int64_t, int64_t)>& progress) {
    const auto total = static_cast<int64_t>(tokens.size());
    if (total == 0) throw InvalidArgument("no tokens to feed");
    check_owner(sequence);
    sequence.settle();
    for (const int32_t token : tokens) check_token(token);
    check_room(sequence, total);
    int64_t done = 0;
    while (done < total) {
        if (stop && stop()) return done;
        const bool all = wanted == LogitsOf::all;
        Job job{&sequence, tokens.subspan(static_cast<size_t>(done)),
                logits + (all ? done * config_.vocab_size : 0), all, stop ? &stop : nullptr};
        scheduler_.run({&job, 1});
        if (job.rows == 0) return done;
        done += job.rows;
        if (progress) progress(done, total);
    }
    return done;
}

const char* Model::host_reason(const Sampler& sampler) const {
    if (const char* reason = sampler.needs_logits()) return reason;
    return backend_->chooses(sampler.choice()) ? nullptr : "the backend";
}

void Model::count_draw(const char* host_reason) {
    const std::lock_guard lock(draws_mutex_);
    ++draws_[host_reason ? std::string("host: ") + host_reason : "backend"];
}

std::map<std::string, int64_t> Model::draws() const {
    const std::lock_guard lock(draws_mutex_);
    return draws_;
}

void Model::run_each(std::span<Sequence* const> sequences, std::span<Job> jobs) {
    if (static_cast<int64_t>(sequences.size()) > chunk_) {
        throw InvalidArgument("at most " + std::to_string(chunk_) + " sequences fit into one step");
    }
    for (size_t i = 0; i < sequences.size(); ++i) {
        check_owner(*sequences[i]);
        sequences[i]->settle();
        check_token(jobs[i].tokens[0]);
        check_room(*sequences[i], 1);
        if (std::find(sequences.begin(), sequences.begin() + static_cast<int64_t>(i), sequences[i]) !=
            sequences.begin() + static_cast<int64_t>(i)) {
            throw InvalidArgument("a sequence may appear only once in a step");
        }
    }
    scheduler_.run(jobs);
}

std::vector<std::pair<std::string, std::vector<float>>> Model::trace(Sequence& sequence, int32_t token) {
    check_owner(sequence);
    sequence.settle();
    check_token(token);
    check_room(sequence, 1);
    std::vector<std::pair<std::string, std::vector<float>>> results;
    std::vector<float> logits(static_cast<size_t>(config_.vocab_size));
    scheduler_.exclusive([&] {
        sequence.reserve(1);
        const std::span<const Op> ops = graph_.trunk;
        for (size_t i = 0; i < ops.size(); ++i) {
            Batch batch;
            batch.tokens = {token};
            batch.segments = {{&sequence, 0, 1}};
            const bool last = std::holds_alternative<Head>(ops[i]);
            if (last) batch.logit_rows = {0};
            batch.logits = logits.data();
            backend_->run(ops.subspan(i, 1), batch);
            const auto [activation, width] = result(ops[i]);
            if (activation < 0) continue;
            std::vector<float> row = backend_->read_activation(activation, 0, 1);
            row.resize(static_cast<size_t>(width));
            if (const auto* up = std::get_if<ExpertsUp>(&ops[i])) clear_padding(up->shape, row);
            results.emplace_back(op_name(ops[i]), std::move(row));
        }
        sequence.commit(&token, 1);
    });
    results.emplace_back("logits", std::move(logits));
    return results;
}

void Model::draft(Sequence& sequence, Sequence& head, std::span<const int32_t> tokens,
                  std::span<const int32_t> next, float* logits) {
    if (!has_mtp()) throw InvalidArgument("the model has no multi-token prediction head");
    check_owner(sequence);
    if (head.kv().layout().owner != graph_.mtp_state.kv.owner) {
        throw InvalidArgument(
            "the head's states belong to something else; make them with new_head_sequence()");
    }
    if (next.empty() || (!tokens.empty() && tokens.size() != next.size())) {
        throw InvalidArgument("the head needs one token after each of the model's");
    }
    if (static_cast<int64_t>(next.size()) > chunk_) {
        throw InvalidArgument("at most " + std::to_string(chunk_) + " rows fit into one pass");
    }
    for (const int32_t token : tokens) check_token(token);
    for (const int32_t token : next) check_token(token);
    check_room(sequence, static_cast<int64_t>(tokens.size()));
    check_room(head, static_cast<int64_t>(next.size()));
    sequence.settle();
    const auto run = [&](std::span<const Op> ops, Sequence& states, std::span<const int32_t> rows,
                         bool wanted) {
        const auto count = static_cast<int64_t>(rows.size());
        states.reserve(count);
        Batch batch;
        batch.tokens.assign(rows.begin(), rows.end());
        batch.segments = {{&states, 0, count}};
        for (int32_t row = 0; wanted && row < count; ++row) batch.logit_rows.push_back(row);
        batch.logits = logits;
        if (wanted) batch.first_hidden = hidden_rows_ - count;
        backend_->run(ops, batch);
        states.commit(rows.data(), count);
        hidden_rows_ = count;
    };
    scheduler_.exclusive([&] {
        if (!tokens.empty()) run(graph_.trunk, sequence, tokens, false);
        if (hidden_rows_ < static_cast<int64_t>(next.size())) {
            throw InvalidArgument("the call before left " + std::to_string(hidden_rows_) +
                                  " hidden rows, fewer than tokens");
        }
        run(graph_.mtp, head, next, true);
    });
}

void Model::forward_each(std::span<Sequence* const> sequences, std::span<const int32_t> tokens,
                         float* logits) {
    if (sequences.empty() || sequences.size() != tokens.size()) {
        throw InvalidArgument("a step of several sequences needs one token for each of them");
    }
    std::vector<Job> jobs;
    for (size_t i = 0; i < sequences.size(); ++i) {
        jobs.push_back(
            {sequences[i], tokens.subspan(i, 1), logits + static_cast<int64_t>(i) * config_.vocab_size});
    }
    run_each(sequences, jobs);
}

std::vector<int32_t> Model::step_each(std::span<Sequence* const> sequences, std::span<const int32_t> tokens,
                                      std::span<Sampler* const> samplers) {
    if (sequences.empty() || sequences.size() != tokens.size()) {
        throw InvalidArgument("a step of several sequences needs one token for each of them");
    }
    if (samplers.size() != sequences.size())
        throw InvalidArgument("step_each needs a sampler for each sequence");
    std::vector<Job> jobs;
    std::vector<Choice> choices(samplers.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
        Job& job = jobs.emplace_back(Job{sequences[i], tokens.subspan(i, 1), nullptr});
        if (host_reason(*samplers[i])) {
            samplers[i]->ensure_logits(config_.vocab_size);
            job.logits = samplers[i]->logits().data();
        } else {
            choices[i] = samplers[i]->choice();
            job.choice = &choices[i];
        }
    }
    run_each(sequences, jobs);
    std::vector<int32_t> drawn;
    for (size_t i = 0; i < jobs.size(); ++i) {
        count_draw(host_reason(*samplers[i]));
        if (jobs[i].choice) {
            samplers[i]->accept(jobs[i].chosen);
            drawn.push_back(jobs[i].chosen);
        } else {
            drawn.push_back(samplers[i]->draw());
        }
    }
    return drawn;
}

// Checks a step, and makes it if drafts of this or an earlier one have to do with it; else returns null.
const float* Model::verify(Sequence& sequence, int32_t token, std::span<const int32_t> drafts) {
    check_owner(sequence);
    check_token(token);
    for (const int32_t draft : drafts) check_token(draft);
    const auto rows = static_cast<int64_t>(drafts.size()) + 1;
    check_room(sequence, rows);
    const int64_t most = std::min(chunk_, Tape::kMostRows);
    if (rows > most) {
        throw InvalidArgument("at most " + std::to_string(most - 1) + " drafts fit into one step, got " +
                              std::to_string(drafts.size()));
    }
    return verifier_.step(sequence, token, drafts);
}

void Model::step_logits(Sequence& sequence, int32_t token, std::span<const int32_t> drafts, float* logits) {
    if (const float* row = verify(sequence, token, drafts)) {
        std::copy(row, row + config_.vocab_size, logits);
    } else {
        forward(sequence, {&token, 1}, LogitsOf::last, logits, {}, {});
    }
}

int32_t Model::step(Sequence& sequence, int32_t token, Sampler& sampler, std::span<const int32_t> drafts) {
    if (const float* row = verify(sequence, token, drafts)) {
        sampler.ensure_logits(config_.vocab_size);
        std::copy(row, row + config_.vocab_size, sampler.logits().begin());
        count_draw(host_reason(sampler));
        return sampler.draw();
    }
    if (!host_reason(sampler)) {
        if (const std::optional<int32_t> chosen = ahead_.step(sequence, token, sampler.choice())) {
            count_draw(nullptr);
            sampler.accept(*chosen);
            return *chosen;
        }
    }
    Sequence* const one = &sequence;
    Sampler* const its = &sampler;
    return step_each({&one, 1}, {&token, 1}, {&its, 1})[0];
}

}  // namespace lily
