#include "backend/metal/decoder_steps.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/metal/choosing.h"
#include "backend/metal/state.h"

namespace lily::metal {
namespace {

// The convolution's inputs stay in the first state: a ring that goes further back than a step.
class DecoderSteps final : public Decoder {
  public:
    DecoderSteps(Passes& passes, const Switches& switches, const Stretch& steps, Sequence& sequence,
                 int32_t token, const Choice& choice)
        : passes_(passes),
          switches_(switches),
          stretch_(steps),
          sequence_(sequence),
          choice_(choice),
          other_(sequence.recurrent().layout()),
          first_position_(sequence.length()),
          words_(passes.device().allocate(4 * kWords, "decode")),
          options_(passes.device().allocate(sizeof(SampleOptions), "options of a choice")) {
        *options_.as<SampleOptions>() = sample_options(choice);
        auto* words = words_.as<uint32_t>();
        std::fill_n(words, kWords, 0u);
        words[kTokens] = static_cast<uint32_t>(token);
        words[kPosition] = static_cast<uint32_t>(first_position_);
        if (choice.adjusts()) {
            slot_.emplace(passes.adjustments().take(choice, passes.vocabulary(choice)));
            words[kSlot] = slot_->number();
        }
    }
    DecoderSteps(const DecoderSteps&) = delete;
    ~DecoderSteps() override {
        if (slot_) passes_.wait_idle();  // before somebody else writes to it
    }

    void start() override {
        const int64_t position = first_position_ + started_;
        write_pages(position);
        const auto now = static_cast<size_t>(started_ % 2);
        const DeviceBuffer* states[2] = {&DeviceStates::recurrent(sequence_.recurrent().block()),
                                         &DeviceStates::recurrent(other_.block())};
        Block block;
        block.rows = 1;
        block.tokens = word(kTokens + now);
        block.positions = word(kPosition);
        block.sequences = word(kZero);
        block.pages = Range(pages_);
        block.table_stride = static_cast<uint32_t>(pages_.size() / 4);
        block.parts = {{states[now], states[1 - now], states[0], 0, 1, 0}};
        block.splits = switches_.splits(position + 1);
        block.cache_pages = divided(static_cast<uint64_t>(position + 1), kPageTokens);
        block.chosen = Chosen{1,
                              word(kZero),
                              word(kPosition),
                              word(kTokens + 1 - now),
                              word(kKeys + now),
                              passes_.vocabulary(choice_),
                              std::nullopt,
                              std::nullopt};
        if (slot_) block.chosen->adjusted = passes_.adjustments().tables(word(kSlot));
        if (slot_ || choice_.temperature > 0.0f) block.chosen->options = Range(options_);
        steps_[now] = passes_.commit(stretch_, false, block);
        ++started_;
    }

    int32_t finish() override {
        const auto now = static_cast<size_t>(finished_ % 2);
        steps_[now].wait();
        const auto* words = words_.as<uint32_t>();
        ++finished_;
        return chosen_token(words[kTokens + 1 - now], words[kKeys + now]);
    }

    void take_back() override {
        passes_.wait_idle();
        if (slot_ && started_ == finished_) slot_->keep(choice_.counts ? finished_ : 0);
        if (finished_ % 2 == 0) return;
        RecurrentState& first = sequence_.recurrent();
        const RecurrentLayout& layout = first.layout();
        const auto inputs = static_cast<size_t>(layout.conv_offset(0));
        std::memcpy(other_.bytes().data() + inputs, first.bytes().data() + inputs,
                    first.bytes().size() - inputs);
        std::swap(first, other_);
    }

  private:
    // Places in words_.
    static constexpr size_t kZero = 0, kPosition = 1, kTokens = 2, kKeys = 4, kSlot = 6, kWords = 7;

    Range word(size_t at) const { return elements(words_, at, 1); }

    void write_pages(int64_t position) {
        const auto count = static_cast<size_t>(position / kPageTokens + 1);
        if (4 * count > pages_.size()) {
            pages_ = passes_.device().allocate(8 * std::max<size_t>(count, 64), "page table");
            written_ = 0;
        }
        for (; written_ < count; ++written_) {
            pages_.as<uint32_t>()[written_] =
                DeviceStates::page_number(sequence_.kv().block(static_cast<int64_t>(written_)));
        }
    }

    Passes& passes_;
    const Switches& switches_;
    Stretch stretch_;
    Sequence& sequence_;
    Choice choice_;
    RecurrentState other_;
    int64_t first_position_;
    DeviceBuffer words_, options_, pages_;
    std::optional<Adjustments::Slot> slot_;
    size_t written_ = 0;  // entries of the page table
    Completion steps_[2];
    int64_t started_ = 0, finished_ = 0;
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(Passes& passes, const Switches& switches, const Stretch& steps,
                                      Sequence& sequence, int32_t token, const Choice& choice) {
    return std::make_unique<DecoderSteps>(passes, switches, steps, sequence, token, choice);
}

}  // namespace lily::metal
