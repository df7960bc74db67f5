// Launches of metal/head.metal.
#include "backend/metal/step.h"

namespace lily::metal {
namespace {

constexpr uint32_t kEmbedThreads = 32;
constexpr uint32_t kEmbedColumns = 1024;  // per threadgroup
constexpr uint32_t kArgmaxThreads = 256;

struct EmbedShape {
    uint32_t rows, hidden, group_shift;
};

struct HeadShape {
    uint32_t rows, cols, outputs, group_shift;
    float eps;
    uint32_t write_logits, groups;
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
                    {divided(table_->cols, kEmbedColumns), block.rows}, {kEmbedThreads}, 2 * out.bytes);
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
          gain_(b.weights.vector(*op.norm)),
          weights_(b.weights.stack({&op.weight, 1})),
          kernels_(b.kernels.of(weights_->format), "head", "head_" + weights_->format.name),
          argmax_(b.kernels.of(weights_->format), "head", "argmax") {
        b.sizes.at_least(&Sizes::logits, op.weight.rows);
        b.sizes.at_least(&Sizes::best, 2 * divided(weights_->rows, weight_rows(kProjectWanted, kMostRows)));
    }

    // `hidden` is written for the wanted rows.
    void encode(const Block& block, Pass& pass) const override {
        if (block.wanted == 0) return;
        const DeviceMatrix& w = *weights_;
        const size_t rows = block.wanted;
        const uint32_t groups = divided(w.rows, weight_rows(kProjectWanted, row_room(block.wanted)));
        const size_t all = size_t{block.rows} * w.cols;
        const Range best = elements(buffers_.best, 0, rows * groups * 2);
        const Range logits = elements(buffers_.logits, 0, rows * w.rows);
        const HeadShape shape{block.wanted, w.cols, w.rows, w.group_shift, eps_, block.write_logits ? 1u : 0u,
                              groups};
        pass.launch(
            kernels_(block.wanted),
            {reads(w.codes), reads(w.scales), reads(w.biases),
             reads(elements(buffers_.activations[size_t(in_)], 0, all)), reads(*gain_), reads(*block.sources),
             block.write_logits ? writes(logits) : unused(buffers_.logits),
             writes(elements(buffers_.activations[size_t(hidden_)], 0, all)), writes(best), constant(shape)},
            {groups}, {kProjectThreads});
        if (!block.choice) return;
        pass.launch(argmax_(),
                    {reads(best), writes(*block.choice), writes(*block.keys), updates(*block.positions),
                     constant(groups), constant(uint32_t{1})},
                    {block.wanted}, {kArgmaxThreads});
    }

  private:
    Activation in_, hidden_;
    float eps_;
    const Buffers& buffers_;
    const Placed* gain_;
    const DeviceMatrix* weights_;
    RowKernels kernels_;
    OneKernel argmax_;
};

}  // namespace

std::unique_ptr<Step> make_step(const Embed& op, Builder& b) { return std::make_unique<EmbedStep>(op, b); }

std::unique_ptr<Step> make_step(const Head& op, Builder& b) { return std::make_unique<HeadStep>(op, b); }

}  // namespace lily::metal
