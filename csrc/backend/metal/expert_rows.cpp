// Launches of metal/routing.metal and of the mixture's kernels in metal/matrix_simdgroup.metal.
#include <algorithm>
#include <cstring>

#include "backend/metal/host_routing.h"
#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "matrix_simdgroup";
constexpr uint32_t kChooseRows = 32, kChooseThreads = 256;
constexpr uint32_t kLayOutThreads = 512;
constexpr uint32_t kScatterThreads = 256;
constexpr uint32_t kRouteRows = 16, kRouteColumns = 64, kRouteThreads = 128;
constexpr uint32_t kCombineColumns = 1024, kCombineThreads = 256;

struct ExpertRowsShape {
    uint32_t experts, top_k, slots, width, shared_width, stride, hidden, group_shift, shared_group_shift,
        part;
};

// Blocks of the routed experts, of the shared one, or all.
enum Part : uint32_t { kAll, kRouted, kShared };

// How the rows of a chunk are listed by expert, and cut into blocks.
class Listing {
  public:
    Listing(const ExpertShape& shape, Builder& b)
        : shape_(shape), path_(b.path), fitted_(b.switches.fitted_tiles), buffers_(b.buffers) {}

    Tiling tiling(uint32_t rows) const { return expert_tiling(path_, rows, experts(), top_k(), fitted_); }
    RoutingShape routing(uint32_t rows) const {
        const bool shared = shape_.shared_width > 0;
        const uint32_t tile = tiling(rows).rows;
        return {rows,
                static_cast<uint32_t>(shape_.experts),
                static_cast<uint32_t>(shape_.top_k),
                shape_.normalize ? 1u : 0u,
                shared ? 1u : 0u,
                tile,
                block_capacity(rows, experts(), top_k(), shared, tile)};
    }
    Range entries(uint32_t rows) const {
        return elements(buffers_.entries, 0, rows * static_cast<size_t>(shape_.slots()));
    }
    Range blocks(uint32_t rows) const {
        return elements(buffers_.blocks, 0, size_t{4} * routing(rows).capacity);
    }
    // Experts that can have rows.
    uint64_t busy(uint32_t rows) const { return std::min(experts(), rows * top_k()); }
    // Rows that are multiplied: an expert's last ones are filled up, by half of that on average.
    uint64_t multiplied(uint32_t rows) const {
        const uint32_t filled_up = fitted_ ? smallest_tile(path_) : tiling(rows).rows;
        return rows * top_k() + busy(rows) * filled_up / 2;
    }
    const MatrixPath& path() const { return path_; }

  private:
    uint64_t experts() const { return static_cast<uint64_t>(shape_.experts); }
    uint64_t top_k() const { return static_cast<uint64_t>(shape_.top_k); }

    ExpertShape shape_;
    const MatrixPath& path_;
    bool fitted_;
    const Buffers& buffers_;
};

class RouteRows final : public Step {
  public:
    RouteRows(const Route& op, Builder& b)
        : normed_(op.normed),
          routing_(op.routing),
          in_(op.in),
          eps_(op.eps),
          shape_(op.shape),
          listing_(op.shape, b),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          on_gpu_(b.switches.gpu_routing),
          gain_(b.weights.vector(*op.norm)),
          norm_(op.in, gain_, op.eps, op.router, b),
          choose_(b.kernels.common(), "routing", "choose_rows"),
          lay_out_(b.kernels.common(), "routing", "lay_out"),
          scatter_(b.kernels.common(), "routing", "scatter_rows") {
        std::vector<Matrix> matrices{op.router};
        matrices.insert(matrices.end(), op.shared_gate.begin(), op.shared_gate.end());
        for (const DeviceMatrix* w : b.weights.stack_by_format(matrices)) {
            parts_.push_back(
                {w, columns_, OneKernel(b.kernels.of(w->format), kFamily, "route_rows_" + w->format.name)});
            columns_ += w->rows;
        }
        b.sizes.at_least(&Sizes::picks, shape_.top_k);
        b.sizes.at_least(&Sizes::entries, shape_.slots());
        b.sizes.at_least(&Sizes::experts, shape_.experts);
        b.sizes.at_least(&Sizes::router_logits, columns_);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const size_t inputs = size_t{rows} * parts_[0].weights->cols;
        norm_.encode(elements(buffers_.activations[size_t(normed_)], 0, inputs, element_), rows, pass);
        for (const auto& [weights, first, kernel] : parts_) {
            const DeviceMatrix& w = *weights;
            const Range own = elements(buffers_.router_logits, first, size_t{rows - 1} * columns_ + w.rows);
            pass.launch(kernel(),
                        {reads(w.codes), reads(w.scales), reads(w.biases),
                         reads(elements(buffers_.activations[size_t(in_)], 0, inputs)), reads(*gain_),
                         reads(elements(buffers_.inverses, 0, rows)), writes(own),
                         constant(RowsShape{rows, w.cols, w.rows, columns_, w.group_shift, eps_})},
                        {divided(w.rows, kRouteColumns), divided(rows, kRouteRows)}, {kRouteThreads},
                        {0, uint64_t{rows} * w.rows * w.cols});
        }
        if (on_gpu_) list_rows(rows, pass);
    }

    bool has_host_part() const override { return !on_gpu_; }
    void run_host_part(const Block& block) const override {
        const Range logits = all_logits(block.rows);
        const HostRouting routed =
            route_on_host(listing_.routing(block.rows), {numbers<const float>(logits), logits.bytes / 4});
        const Range entries = listing_.entries(block.rows), blocks = listing_.blocks(block.rows);
        std::ranges::copy(routed.routing, numbers<float>(routing(block.rows)));
        std::ranges::copy(routed.entries, numbers<uint32_t>(entries));
        std::memcpy(numbers<uint32_t>(blocks), routed.blocks.data(), blocks.bytes);
    }

  private:
    struct Part {
        const DeviceMatrix* weights;
        uint32_t first;  // column
        OneKernel kernel;
    };

    template <typename T>
    static T* numbers(const Range& range) {
        return reinterpret_cast<T*>(range.buffer->contents() + range.offset);
    }
    Range all_logits(uint32_t rows) const {
        return elements(buffers_.router_logits, 0, size_t{rows} * columns_);
    }
    Range routing(uint32_t rows) const {
        return elements(buffers_.activations[size_t(routing_)], 0,
                        rows * static_cast<size_t>(shape_.top_k + shape_.slots()));
    }

    void list_rows(uint32_t rows, Pass& pass) const {
        const RoutingShape shape = listing_.routing(rows);
        const Range picks = elements(buffers_.picks, 0, size_t{rows} * shape.top_k);
        const Range counts = elements(buffers_.counts, 0, size_t{shape.experts} * divided(rows, kChooseRows));
        const Range entries = listing_.entries(rows);
        pass.launch(
            choose_(),
            {reads(all_logits(rows)), writes(routing(rows)), writes(picks), writes(counts), constant(shape)},
            {divided(rows, kChooseRows)}, {kChooseThreads});
        pass.launch(lay_out_(), {updates(counts), writes(listing_.blocks(rows)), constant(shape)}, {1},
                    {kLayOutThreads});
        pass.launch(scatter_(), {reads(picks), reads(counts), writes(entries), constant(shape)},
                    {divided(entries.bytes / 4, kScatterThreads)}, {kScatterThreads});
    }

    Activation normed_, routing_, in_;
    float eps_;
    ExpertShape shape_;
    Listing listing_;
    const Buffers& buffers_;
    size_t element_;
    bool on_gpu_;
    const Placed* gain_;
    NormRows norm_;
    std::vector<Part> parts_;
    uint32_t columns_ = 0;
    OneKernel choose_, lay_out_, scatter_;
};

// The experts of one direction: routed and shared, in one launch or two.
class ExpertProductRows : public Step {
  protected:
    ExpertProductRows(const ExpertShape& shape, int64_t hidden, const std::string& kernel,
                      const DeviceMatrix* routed, const DeviceMatrix* shared, Builder& b)
        : shape_(shape),
          hidden_(static_cast<uint32_t>(hidden)),
          listing_(shape, b),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          routed_(routed, static_cast<uint64_t>(shape.experts), 0, b) {
        if (shared) shared_.emplace(shared, 1, routed_.end(), b);
        const auto add = [&](const Operand& operand, Part part) {
            const NumberFormat& format = operand.format();
            launches_.push_back({TileKernels(b.kernels.of(format), kernel + "_" + format.name), part});
        };
        const bool together = !shared || shared->format == routed->format;
        add(routed_, together ? kAll : kRouted);
        if (!together) add(*shared_, kShared);
    }

    uint32_t stride() const { return static_cast<uint32_t>(std::max(shape_.width, shape_.shared_width)); }
    size_t pairs(uint32_t rows) const { return rows * static_cast<size_t>(shape_.slots()); }
    ExpertRowsShape structure(Part part) const {
        return {static_cast<uint32_t>(shape_.experts),
                static_cast<uint32_t>(shape_.top_k),
                static_cast<uint32_t>(shape_.slots()),
                static_cast<uint32_t>(shape_.width),
                static_cast<uint32_t>(shape_.shared_width),
                stride(),
                hidden_,
                routed_.stored().group_shift,
                shared_ ? shared_->stored().group_shift : 5,
                part};
    }

    void launch(const Block& block, const Range& in, const Range& out, uint32_t groups, Pass& pass) const {
        const uint32_t rows = block.rows;
        const Operand& s = shared_ ? *shared_ : routed_;
        const auto [codes, scales, biases] = routed_.arguments();
        const auto [shared_codes, shared_scales, shared_biases] = s.arguments();
        const Tiling tile = listing_.tiling(rows);
        const Range entries = listing_.entries(rows), blocks = listing_.blocks(rows);
        routed_.expand(pass);
        if (shared_) shared_->expand(pass);
        for (const auto& [kernels, part] : launches_) {
            pass.launch(kernels(listing_.path(), tile),
                        {codes, scales, biases, shared_codes, shared_scales, shared_biases, reads(in),
                         reads(entries), reads(blocks), writes(out), constant(structure(part))},
                        {groups, listing_.routing(rows).capacity}, {tile.threads},
                        work(part, rows, in.bytes + out.bytes + entries.bytes + blocks.bytes));
        }
    }

    // Each expert that has rows is read once; `activations` are split evenly.
    Work work(Part part, uint32_t rows, uint64_t activations) const {
        Work work(part == kAll ? activations : activations / 2);
        const auto add = [&](const Operand& operand, uint64_t matrices, uint64_t multiplied) {
            work.bytes += matrices * operand.matrix_bytes();
            work.multiply_adds += multiplied * operand.stored().rows * operand.stored().cols;
        };
        if (part != kShared) add(routed_, listing_.busy(rows), listing_.multiplied(rows));
        if (part != kRouted && shared_) add(*shared_, 1, rows);
        return work;
    }

    struct Launch {
        TileKernels kernels;
        Part part;
    };
    ExpertShape shape_;
    uint32_t hidden_;
    Listing listing_;
    const Buffers& buffers_;
    size_t element_;
    Operand routed_;
    std::optional<Operand> shared_;
    std::vector<Launch> launches_;
};

class ExpertsUpRows final : public ExpertProductRows {
  public:
    ExpertsUpRows(const ExpertsUp& op, Builder& b)
        : ExpertProductRows(op.shape, op.gate[0].cols, "experts_up_rows",
                            b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.gate, &op.up}),
                            b.weights.stack_lists({&op.shared_gate, &op.shared_up}), b),
          in_(op.in),
          out_(op.out) {}

    void encode(const Block& block, Pass& pass) const override {
        launch(block, elements(buffers_.activations[size_t(in_)], 0, size_t{block.rows} * hidden_, element_),
               elements(buffers_.activations[size_t(out_)], 0, pairs(block.rows) * stride(), element_),
               divided(stride(), listing_.tiling(block.rows).pair_columns), pass);
    }

  private:
    Activation in_, out_;
};

class ExpertsDownRows final : public ExpertProductRows {
  public:
    ExpertsDownRows(const ExpertsDown& op, Builder& b)
        : ExpertProductRows(op.shape, op.down[0].rows, "experts_down_rows",
                            b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.down}),
                            b.weights.stack_lists({&op.shared_down}), b),
          in_(op.in),
          residual_(op.residual),
          routing_(op.routing),
          combine_(b.kernels.of(routed_.format()), kFamily, "combine_rows") {
        b.sizes.at_least(&Sizes::down, op.shape.slots() * hidden_);
    }

    void encode(const Block& block, Pass& pass) const override {
        const Range down = elements(buffers_.down, 0, pairs(block.rows) * hidden_, element_);
        launch(block, elements(buffers_.activations[size_t(in_)], 0, pairs(block.rows) * stride(), element_),
               down, divided(hidden_, listing_.tiling(block.rows).down_columns), pass);
        const auto routing = static_cast<size_t>(shape_.top_k + shape_.slots());
        pass.launch(
            combine_(),
            {reads(down), reads(elements(buffers_.activations[size_t(routing_)], 0, block.rows * routing)),
             updates(elements(buffers_.activations[size_t(residual_)], 0, size_t{block.rows} * hidden_)),
             constant(structure(kAll))},
            {divided(hidden_, kCombineColumns), block.rows}, {kCombineThreads});
    }

  private:
    Activation in_, residual_, routing_;
    OneKernel combine_;
};

}  // namespace

std::unique_ptr<Step> make_rows_step(const Route& op, Builder& b) {
    return std::make_unique<RouteRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const ExpertsUp& op, Builder& b) {
    return std::make_unique<ExpertsUpRows>(op, b);
}

std::unique_ptr<Step> make_rows_step(const ExpertsDown& op, Builder& b) {
    return std::make_unique<ExpertsDownRows>(op, b);
}

}  // namespace lily::metal
