#include "runtime/verifier.h"

#include <utility>

#include "base/error.h"

namespace lily {

Verifier::~Verifier() {
    while (!rows_.empty()) settle(*rows_.begin()->first);
}

const float* Verifier::step(Sequence& sequence, int32_t token, std::span<const int32_t> drafts) {
    if (const float* logits = take(sequence, token)) return logits;
    if (drafts.empty()) return nullptr;
    sequence.settle();
    return compute(sequence, token, drafts);
}

const float* Verifier::take(const Sequence& sequence, int32_t token) {
    const std::lock_guard lock(mutex_);
    const auto found = rows_.find(&sequence);
    if (found == rows_.end()) return nullptr;
    Rows& rows = *found->second;
    if (rows.listed == static_cast<int64_t>(rows.tokens.size())) return nullptr;
    if (rows.tokens[static_cast<size_t>(rows.listed)] != token) return nullptr;
    rows.sequence->commit(&token, 1);
    return rows.logits.data() + vocab_ * rows.listed++;
}

const float* Verifier::compute(Sequence& sequence, int32_t token, std::span<const int32_t> drafts) {
    std::unique_ptr<Rows> rows = make_rows();
    rows->sequence = &sequence;
    rows->tokens.assign(1, token);
    rows->tokens.insert(rows->tokens.end(), drafts.begin(), drafts.end());
    rows->logits.resize(rows->tokens.size() * static_cast<size_t>(vocab_));
    Job job{.sequence = &sequence,
            .tokens = rows->tokens,
            .logits = rows->logits.data(),
            .all = true,
            .tape = rows->tape.get()};
    scheduler_.run({&job, 1});
    rows->tokens.resize(static_cast<size_t>(job.rows));
    rows->listed = 1;
    const float* logits = rows->logits.data();
    const std::lock_guard lock(mutex_);
    rows_.insert_or_assign(&sequence, std::move(rows));
    sequence.set_ahead(this);
    return logits;
}

void Verifier::settle(const Sequence& sequence) {
    std::unique_ptr<Rows> rows = release(sequence);
    if (!rows) return;
    Sequence& its = *rows->sequence;
    its.set_ahead(nullptr);
    its.reserve(0);  // should this fail half-way, the sequence says so
    scheduler_.exclusive([&] { backend_.advance(ops_, its, *rows->tape, rows->listed); });
    its.kv().truncate(its.length());
    its.commit(nullptr, 0);
    const std::lock_guard lock(mutex_);
    spare_ = std::move(rows);
}

std::unique_ptr<Verifier::Rows> Verifier::make_rows() {
    {
        const std::lock_guard lock(mutex_);
        if (spare_) return std::move(spare_);
    }
    auto rows = std::make_unique<Rows>();
    rows->tape = backend_.new_tape();
    if (!rows->tape) throw BackendError("drafts can't be verified on this backend: " + backend_.describe());
    return rows;
}

std::unique_ptr<Verifier::Rows> Verifier::release(const Sequence& sequence) {
    const std::lock_guard lock(mutex_);
    const auto found = rows_.find(&sequence);
    if (found == rows_.end()) return nullptr;
    std::unique_ptr<Rows> rows = std::move(found->second);
    rows_.erase(found);
    return rows;
}

}  // namespace lily
