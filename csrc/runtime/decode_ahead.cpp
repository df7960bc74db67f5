#include "runtime/decode_ahead.h"

#include <utility>

#include "base/error.h"

namespace lily {

DecodeAhead::~DecodeAhead() {
    if (sequence_) settle(*sequence_);
}

std::optional<int32_t> DecodeAhead::step(Sequence& sequence, int32_t token, const Choice& choice) {
    std::optional<int32_t> chosen;
    scheduler_.alone(sequence, [&] {
        if (sequence_ && sequence_ != &sequence) return;
        if (sequence_ && (token != foreseen_ || choice != choice_)) end();
        if (!sequence_) begin(sequence, token, choice);
        if (sequence_) chosen = advance(token);
    });
    return chosen;
}

void DecodeAhead::settle(const Sequence& sequence) {
    scheduler_.exclusive([&] {
        if (sequence_ == &sequence) end();
    });
}

void DecodeAhead::begin(Sequence& sequence, int32_t token, const Choice& choice) {
    sequence.require_settled();
    try {
        decoder_ = backend_.decoder(ops_, sequence, token, choice);
    } catch (const MemoryBudgetError&) {
        return;  // one step after the other needs less
    }
    if (!decoder_) return;
    sequence_ = &sequence;
    choice_ = choice;
    under_way_ = false;
    sequence.set_ahead(this);
}

int32_t DecodeAhead::advance(int32_t token) {
    try {
        sequence_->reserve(1);
        if (!under_way_) decoder_->start();
        const int64_t next = sequence_->length() + 1;
        under_way_ = next < positions_;
        if (under_way_) {
            try {
                sequence_->kv().reserve(next, next + 1);
            } catch (const MemoryBudgetError&) {
                under_way_ = false;  // the caller may be content with what it gets
            }
        }
        if (under_way_) decoder_->start();
        foreseen_ = decoder_->finish();
        sequence_->commit(&token, 1);
        if (choice_.counts) ++choice_.counted;  // as the caller will, if it takes the token
        return foreseen_;
    } catch (...) {
        // The states are a mixture now, and the sequence says so.
        decoder_.reset();
        std::exchange(sequence_, nullptr)->set_ahead(nullptr);
        throw;
    }
}

void DecodeAhead::end() {
    decoder_->take_back();
    decoder_.reset();
    sequence_->kv().truncate(sequence_->length());
    std::exchange(sequence_, nullptr)->set_ahead(nullptr);
}

}  // namespace lily
