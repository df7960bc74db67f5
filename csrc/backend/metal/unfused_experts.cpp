// Launches of metal/ablation/unfused_experts.metal.
#include <optional>

#include "backend/metal/unfused.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "unfused_experts";
constexpr uint32_t kThreads = 256, kChooseThreads = 32;

struct ChoiceShape {
    uint32_t experts, top_k, normalize, shared;
};

struct ExpertProductShape {
    uint32_t top_k, shared, first_slot, all_slots, height, first, outputs, cols, shared_first, shared_outputs,
        shared_cols, in_row, in_slot, out_slot, group_shift, shared_group_shift;
};

struct SlotShape {
    uint32_t top_k, shared, hidden;
};

uint32_t stride_of(const ExpertShape& s) { return static_cast<uint32_t>(std::max(s.width, s.shared_width)); }

// Rows [first, first + outputs) of each expert in a stack.
struct ExpertPart {
    const DeviceMatrix* stack;
    uint32_t first, outputs;
    uint64_t bytes() const { return stack->matrix_bytes * outputs / stack->rows; }
};

// out[row, slot] = W_e in[row, slot], for the slots of the routed experts, of the shared one, or of both.
class ExpertProducts {
  public:
    ExpertProducts(const ExpertShape& shape, std::optional<ExpertPart> routed,
                   std::optional<ExpertPart> shared, Builder& b)
        : shape_(shape), outputs_(b.switches.outputs()) {
        const auto top_k = static_cast<uint32_t>(shape.top_k);
        const auto add = [&](const ExpertPart& part, uint32_t first, uint32_t slots, uint64_t work) {
            launches_.push_back({routed.value_or(part), shared.value_or(part), first, slots, work,
                                 OneKernel(b.kernels.unfused(part.stack->format), kFamily,
                                           "expert_product_" + part.stack->format.name)});
        };
        if (routed && shared && routed->stack->format == shared->stack->format) {
            add(*routed, 0, top_k + 1, top_k * routed->bytes() + shared->bytes());
            return;
        }
        if (routed) add(*routed, 0, top_k, top_k * routed->bytes());
        if (shared) add(*shared, top_k, 1, shared->bytes());
    }

    // A row's input has `in_row` numbers, a slot's begins `in_slot` after the one before; slots of `out` are
    // `out_slot` apart.
    void encode(const Range& in, uint32_t in_row, uint32_t in_slot, const Range& routing, const Range& out,
                uint32_t out_slot, uint32_t rows, Pass& pass) const {
        for (const Launch& l : launches_) {
            const DeviceMatrix &r = *l.routed.stack, &s = *l.shared.stack;
            const bool with_routed = l.first_slot == 0;
            const bool with_shared = l.first_slot + l.slots > static_cast<uint32_t>(shape_.top_k);
            const ExpertProductShape shape{static_cast<uint32_t>(shape_.top_k),
                                           shape_.shared_width > 0 ? 1u : 0u,
                                           l.first_slot,
                                           static_cast<uint32_t>(shape_.slots()),
                                           r.rows,
                                           l.routed.first,
                                           l.routed.outputs,
                                           r.cols,
                                           l.shared.first,
                                           l.shared.outputs,
                                           s.cols,
                                           in_row,
                                           in_slot,
                                           out_slot,
                                           r.group_shift,
                                           s.group_shift};
            const uint32_t most =
                std::max(with_routed ? shape.outputs : 0, with_shared ? shape.shared_outputs : 0);
            pass.launch(l.kernel(),
                        {reads(r.codes), reads(r.scales), reads(r.biases), reads(s.codes), reads(s.scales),
                         reads(s.biases), reads(in), with_routed ? reads(routing) : unused(*routing.buffer),
                         writes(out), constant(shape)},
                        {divided(most, outputs_.pieces()), l.slots, rows}, {kThreads},
                        {.read = rows * l.work + in.bytes});
        }
    }

  private:
    struct Launch {
        ExpertPart routed, shared;
        uint32_t first_slot, slots;
        uint64_t work;  // bytes of weights for a row
        OneKernel kernel;
    };
    ExpertShape shape_;
    Outputs outputs_;
    std::vector<Launch> launches_;
};

// Gate and up of a list of experts as parts: of one stack, if they have one format.
std::pair<ExpertPart, ExpertPart> halves(const ExpertMatrices& gate, const ExpertMatrices& up, Builder& b) {
    const auto width = static_cast<uint32_t>(gate.front().rows);
    if (Weights::same_format(gate.front(), up.front())) {
        const DeviceMatrix* both = b.weights.stack_experts(std::vector{&gate, &up});
        return {{both, 0, width}, {both, width, width}};
    }
    return {{b.weights.stack_experts(std::vector{&gate}), 0, width},
            {b.weights.stack_experts(std::vector{&up}), 0, width}};
}

class UnfusedExpertsUp final : public Step {
  public:
    UnfusedExpertsUp(const ExpertsUp& op, bool routed, Builder& b)
        : in_(op.in),
          out_(op.out),
          routing_(op.routing),
          shape_(op.shape),
          hidden_(static_cast<uint32_t>(op.gate.front().cols)),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()) {
        std::optional<ExpertPart> gates[2], ups[2];
        if (routed) std::tie(gates[0], ups[0]) = halves(op.gate, op.up, b);
        if (!op.shared_gate.empty()) std::tie(gates[1], ups[1]) = halves(op.shared_gate, op.shared_up, b);
        gate_.emplace(shape_, gates[0], gates[1], b);
        up_.emplace(shape_, ups[0], ups[1], b);
        const DeviceMatrix& sample = *(routed ? gates[0] : gates[1])->stack;
        swiglu_.emplace(sample, b);
        if (routed) choose_.emplace(b.kernels.unfused(sample.format), kFamily, "choose");
        b.sizes.at_least(&Sizes::scratch, 2 * static_cast<int64_t>(row_width()));
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const size_t width = row_width();
        const uint32_t stride = stride_of(shape_);
        const auto top_k = static_cast<uint32_t>(shape_.top_k);
        const auto slots = static_cast<uint32_t>(shape_.slots());
        const Range routing =
            elements(buffers_.activations[size_t(routing_)], 0, size_t{rows} * (top_k + slots));
        if (choose_) {
            const ChoiceShape choice{static_cast<uint32_t>(shape_.experts), top_k, shape_.normalize ? 1u : 0u,
                                     slots - top_k};
            const size_t logits = size_t{choice.experts} + choice.shared;
            pass.launch((*choose_)(),
                        {reads(elements(buffers_.router_logits, 0, rows * logits)), writes(routing),
                         constant(choice)},
                        {rows}, {kChooseThreads});
        }
        const Range in = elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * hidden_, element_);
        const Range gate = scratch_rows(buffers_, 0, rows, width, element_);
        const Range up = scratch_rows(buffers_, width, rows, width, element_);
        gate_->encode(in, hidden_, 0, routing, gate, stride, rows, pass);
        up_->encode(in, hidden_, 0, routing, up, stride, rows, pass);
        const auto multiply = [&](uint32_t first, uint32_t count, int64_t columns) {
            const auto rest = [&](const Range& r) {
                const size_t skipped = first * stride * element_;
                return Range(*r.buffer, r.offset + skipped, r.bytes - skipped);
            };
            const Range out = elements(buffers_.activations[size_t(out_)], 0, rows * width, element_);
            swiglu_->encode(rest(gate), rest(up), rest(out),
                            {static_cast<uint32_t>(columns), stride, slots * stride}, count, rows, pass);
        };
        if (choose_ && (slots == top_k || shape_.width == shape_.shared_width)) {
            multiply(0, slots, shape_.width);
            return;
        }
        if (choose_) multiply(0, top_k, shape_.width);
        multiply(top_k, 1, shape_.shared_width);
    }

  private:
    size_t row_width() const { return static_cast<size_t>(shape_.slots()) * stride_of(shape_); }

    Activation in_, out_, routing_;
    ExpertShape shape_;
    uint32_t hidden_;
    const Buffers& buffers_;
    size_t element_;
    std::optional<OneKernel> choose_;
    std::optional<ExpertProducts> gate_, up_;
    std::optional<Swiglu> swiglu_;
};

class UnfusedExpertsDown final : public Step {
  public:
    UnfusedExpertsDown(const ExpertsDown& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          routing_(op.routing),
          shape_(op.shape),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          stack_(b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.down})),
          hidden_(stack_->rows),
          down_(shape_, ExpertPart{stack_, 0, hidden_}, shared_part(op, b), b),
          weigh_(b.kernels.unfused(stack_->format), kFamily, "weigh_slots"),
          add_shared_(b.kernels.unfused(stack_->format), kFamily, "add_shared"),
          add_(*stack_, b) {
        b.sizes.at_least(&Sizes::scratch, (shape_.slots() + 1) * int64_t{hidden_});
    }

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const uint32_t stride = stride_of(shape_);
        const auto top_k = static_cast<uint32_t>(shape_.top_k);
        const auto slots = static_cast<uint32_t>(shape_.slots());
        const Range routing = elements(buffers_.activations[size_t(routing_)], 0, rows * (top_k + slots));
        const Range in = elements(buffers_.activations[size_t(in_)], 0, rows * slots * stride, element_);
        const Range by_slot = scratch_rows(buffers_, 0, rows, size_t{slots} * hidden_, element_);
        const Range sum = scratch_rows(buffers_, size_t{slots} * hidden_, rows, hidden_, element_);
        const Range residual = elements(buffers_.activations[size_t(residual_)], 0, rows * hidden_);
        down_.encode(in, slots * stride, stride, routing, by_slot, hidden_, block.rows, pass);
        const SlotShape shape{top_k, slots - top_k, hidden_};
        const Extent grid{divided(hidden_, kThreads), block.rows};
        pass.launch(weigh_(), {reads(by_slot), reads(routing), writes(sum), constant(shape)}, grid,
                    {kThreads});
        if (slots > top_k) {
            pass.launch(add_shared_(), {reads(by_slot), reads(routing), updates(residual), constant(shape)},
                        grid, {kThreads});
        }
        add_.encode(sum, residual, block.rows * hidden_, pass);
    }

  private:
    static std::optional<ExpertPart> shared_part(const ExpertsDown& op, Builder& b) {
        const DeviceMatrix* shared = b.weights.stack_lists({&op.shared_down});
        return shared ? std::optional(ExpertPart{shared, 0, shared->rows}) : std::nullopt;
    }

    Activation in_, residual_, routing_;
    ExpertShape shape_;
    const Buffers& buffers_;
    size_t element_;
    const DeviceMatrix* stack_;
    uint32_t hidden_;
    ExpertProducts down_;
    OneKernel weigh_, add_shared_;
    AddRows add_;
};

}  // namespace

std::unique_ptr<Step> make_unfused_step(const ExpertsUp& op, bool routed, Builder& b) {
    return std::make_unique<UnfusedExpertsUp>(op, routed, b);
}

std::unique_ptr<Step> make_unfused_step(const ExpertsDown& op, Builder& b) {
    return std::make_unique<UnfusedExpertsDown>(op, b);
}

}  // namespace lily::metal
