// Launches of metal/head.metal.
#include <algorithm>
#include <bit>

#include "backend/metal/step.h"

namespace lily::metal {
namespace {

constexpr uint32_t kEmbedThreads = 32;
constexpr uint32_t kEmbedColumns = 1024;  // per threadgroup
constexpr uint32_t kArgmaxThreads = 256;
constexpr uint32_t kNormThreads = 256;
constexpr uint32_t kBinThreads = 256;
constexpr uint32_t kBinSlice = 4096;  // tokens of a threadgroup of sample_bins
constexpr uint32_t kSampleThreads = 512;
constexpr uint32_t kAdjustGroups = 8;  // partial choices of a threadgroup of adjust_logits
constexpr uint32_t kAdjustThreads = 256;

struct EmbedShape {
    uint32_t rows, hidden, group_shift;
};

struct NormShape {
    uint32_t cols;
    float eps;
};

struct CombineShape {
    uint32_t rows, cols, outputs, out_stride, group_shift;
    float eps;
};

struct HeadShape {
    uint32_t rows, cols, outputs, group_shift;
    float eps;
    uint32_t write_logits, groups;
};

struct SampleShape {
    uint32_t vocabulary, stride, groups, group_size, advance;
};

class EmbedStep final : public Step {
  public:
    EmbedStep(const Embed& op, Builder& b)
        : out_(op.out),
          buffers_(b.buffers),
          table_(b.weights.stack({&op.table, 1})),
          kernel_(b.kernels.of(table_->format), "head", "embed_" + table_->format.name) {}

    void encode(const Block& block, Pass& pass) const override {
        const Range out = elements(buffers_.activations[size_t(out_)], 0, size_t{block.rows} * table_->cols);
        pass.launch(kernel_(),
                    {reads(table_->codes), reads(table_->scales), reads(table_->biases), reads(*block.tokens),
                     writes(out), constant(EmbedShape{block.rows, table_->cols, table_->group_shift})},
                    {divided(table_->cols, kEmbedColumns), block.rows}, {kEmbedThreads}, {.read = out.bytes});
    }

  private:
    Activation out_;
    const Buffers& buffers_;
    const DeviceMatrix* table_;
    OneKernel kernel_;
};

class HeadStep final : public Step {
  public:
    HeadStep(const Head& op, Builder& b)
        : in_(op.in),
          hidden_(op.hidden),
          eps_(op.eps),
          buffers_(b.buffers),
          outputs_(b.switches.outputs()),
          gain_(b.weights.vector(*op.norm)),
          weights_(b.weights.stack({&op.weight, 1})),
          kernels_(b.kernels.of(weights_->format), "head", "head_" + weights_->format.name),
          keeps_hidden_(b.hidden == op.hidden),
          norm_rows_(b.kernels.of(weights_->format), "combine", "norm_rows"),
          argmax_(b.kernels.of(weights_->format), "head", "argmax"),
          adjust_(b.kernels.common(), "sample", "adjust_logits"),
          bins_(b.kernels.common(), "sample", "sample_bins"),
          sample_(b.kernels.common(), "sample", "sample") {
        b.sizes.at_least(&Sizes::logits, op.weight.rows);
        b.sizes.at_least(&Sizes::best, 2 * divided(weights_->rows, outputs_.project(kMostRows)));
    }

    // `hidden` is written for the wanted rows, or of all rows where a draft head reads them. Rows of logits
    // and rows of choices are launches of their own: they have different vocabularies.
    void encode(const Block& block, Pass& pass) const override {
        const bool all_wanted =
            block.wanted == block.rows || (block.chosen && block.chosen->rows == block.rows);
        if (keeps_hidden_ && !all_wanted && !block.head_again) {
            const size_t all = size_t{block.rows} * weights_->cols;
            pass.launch(
                norm_rows_(),
                {reads(elements(buffers_.activations[size_t(in_)], 0, all)), reads(*gain_),
                 writes(elements(buffers_.last_hidden, size_t{block.first_row} * weights_->cols, all)),
                 constant(NormShape{weights_->cols, eps_})},
                {block.rows}, {kNormThreads});
        }
        const size_t wanted = size_t{block.wanted} * weights_->rows;
        if (block.wanted > 0) {
            launch_head(block, pass, block.wanted, *block.sources, weights_->rows,
                        elements(buffers_.logits, 0, wanted), true);
        }
        if (!block.chosen) return;
        const Chosen& chosen = *block.chosen;
        const uint32_t vocabulary = std::min(chosen.vocabulary, weights_->rows);
        // Behind those that the host will read; a row is wanted or chosen, so that there is room.
        const Range logits = elements(buffers_.logits, wanted, size_t{chosen.rows} * vocabulary);
        launch_head(block, pass, chosen.rows, chosen.sources, vocabulary, logits, chosen.options.has_value());
        const uint32_t groups = groups_of(vocabulary, chosen.rows);
        const Range best = elements(buffers_.best, 0, size_t{chosen.rows} * groups * 2);
        if (!chosen.options) {
            pass.launch(argmax_(),
                        {reads(best), writes(chosen.tokens), writes(chosen.keys), updates(chosen.positions),
                         constant(groups), constant(uint32_t{1})},
                        {chosen.rows}, {kArgmaxThreads});
            return;
        }
        const Range bins = elements(buffers_.bins, 0, chosen.rows * kBinNumbers);
        const SampleShape shape{vocabulary, vocabulary, groups, outputs_.project(chosen.rows), 1};
        const Chosen::Adjusted* adjusted = chosen.adjusted ? &*chosen.adjusted : nullptr;
        if (adjusted) {
            pass.launch(
                adjust_(),
                {updates(logits), updates(best), reads(*chosen.options), reads(adjusted->slots),
                 reads(adjusted->counts), reads(adjusted->bias), reads(adjusted->masks), constant(shape)},
                {divided(groups, kAdjustGroups), chosen.rows}, {kAdjustThreads}, {.read = 2 * logits.bytes});
        }
        pass.launch(bins_(),
                    {reads(logits), reads(best), reads(*chosen.options), updates(bins), constant(shape)},
                    {divided(vocabulary, kBinSlice), chosen.rows}, {kBinThreads});
        pass.launch(sample_(),
                    {reads(logits), reads(best), reads(*chosen.options), updates(bins), writes(chosen.tokens),
                     writes(chosen.keys), updates(chosen.positions),
                     adjusted ? reads(adjusted->slots) : unused(*chosen.sources.buffer),
                     adjusted ? updates(adjusted->counts) : unused(buffers_.bins), constant(shape)},
                    {chosen.rows}, {kSampleThreads},
                    {.read = logits.bytes + bins.bytes, .written = bins.bytes});
    }

  private:
    // Where a launch for so many rows of the block writes their hidden rows.
    Range hidden_rows(const Block& block, uint32_t rows) const {
        const size_t all = size_t{block.rows} * weights_->cols;
        if (!keeps_hidden_ || rows != block.rows) {
            return elements(buffers_.activations[size_t(hidden_)], 0, all);
        }
        return elements(buffers_.last_hidden, size_t{block.first_row} * weights_->cols, all);
    }

    uint32_t groups_of(uint32_t outputs, uint32_t rows) const {
        return divided(outputs, outputs_.project(rows));
    }

    void launch_head(const Block& block, Pass& pass, uint32_t wanted, const Range& sources, uint32_t outputs,
                     const Range& logits, bool write_logits) const {
        const DeviceMatrix& w = *weights_;
        const uint32_t groups = groups_of(outputs, wanted);
        const size_t all = size_t{block.rows} * w.cols;
        pass.launch(
            kernels_(wanted),
            {reads(w.codes), reads(w.scales), reads(w.biases),
             reads(elements(buffers_.activations[size_t(in_)], 0, all)), reads(*gain_), reads(sources),
             write_logits ? writes(logits) : unused(buffers_.logits), writes(hidden_rows(block, wanted)),
             writes(elements(buffers_.best, 0, size_t{wanted} * groups * 2)),
             constant(
                 HeadShape{wanted, w.cols, outputs, w.group_shift, eps_, write_logits ? 1u : 0u, groups})},
            {groups}, {kProjectThreads});
    }

    Activation in_, hidden_;
    float eps_;
    const Buffers& buffers_;
    Outputs outputs_;
    const Placed* gain_;
    const DeviceMatrix* weights_;
    RowKernels kernels_;
    bool keeps_hidden_;
    OneKernel norm_rows_, argmax_, adjust_, bins_, sample_;
};

// The beginning of a draft head: hidden rows are those that the head of a list left for the batch before.
class CombineHiddenStep final : public Step {
  public:
    CombineHiddenStep(const CombineHidden& op, Builder& b)
        : embedding_(op.embedding),
          out_(op.out),
          eps_(op.eps),
          buffers_(b.buffers),
          outputs_(b.switches.outputs()),
          embedding_norm_(b.weights.vector(*op.embedding_norm)),
          hidden_norm_(b.weights.vector(*op.hidden_norm)),
          rows_(b.weights.vector(row_numbers())),
          weights_(b.weights.stack({&op.weight, 1})),
          kernels_(b.kernels.of(weights_->format), "combine", "combine_hidden_" + weights_->format.name) {}

    // kMostRows at a time: one matrix of the head, so that prompts don't need another kernel.
    void encode(const Block& block, Pass& pass) const override {
        const DeviceMatrix& w = *weights_;
        const uint32_t cols = w.cols / 2;
        for (uint32_t first = 0; first < block.rows; first += kMostRows) {
            const uint32_t rows = std::min<uint32_t>(kMostRows, block.rows - first);
            const size_t begin = size_t{first} * cols, all = size_t{rows} * cols;
            const size_t hidden = size_t{block.first_hidden} * cols + begin;
            pass.launch(kernels_(rows),
                        {reads(w.codes), reads(w.scales), reads(w.biases),
                         reads(elements(buffers_.activations[size_t(embedding_)], begin, all)),
                         reads(*embedding_norm_), reads(elements(buffers_.last_hidden, hidden, all)),
                         reads(*hidden_norm_), reads(*rows_),
                         writes(elements(buffers_.activations[size_t(out_)], size_t{first} * w.rows,
                                         size_t{rows} * w.rows)),
                         constant(CombineShape{rows, cols, w.rows, w.rows, w.group_shift, eps_})},
                        {divided(w.rows, outputs_.pieces())}, {kProjectThreads});
        }
    }

  private:
    // 0, 1, ..., as the bits of floats.
    static std::vector<float> row_numbers() {
        std::vector<float> rows;
        for (uint32_t row = 0; row < kMostRows; ++row) rows.push_back(std::bit_cast<float>(row));
        return rows;
    }

    Activation embedding_, out_;
    float eps_;
    const Buffers& buffers_;
    Outputs outputs_;
    const Placed *embedding_norm_, *hidden_norm_, *rows_;
    const DeviceMatrix* weights_;
    RowKernels kernels_;
};

}  // namespace

std::unique_ptr<Step> make_step(const CombineHidden& op, Builder& b) {
    return std::make_unique<CombineHiddenStep>(op, b);
}

std::unique_ptr<Step> make_step(const Embed& op, Builder& b) { return std::make_unique<EmbedStep>(op, b); }

std::unique_ptr<Step> make_step(const Head& op, Builder& b) { return std::make_unique<HeadStep>(op, b); }

}  // namespace lily::metal
