// Launches of metal/routing.metal and of the mixture's kernels in metal/matrix_simdgroup.metal.
#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "matrix_simdgroup";
constexpr uint32_t kChooseRows = 32, kChooseThreads = 256;
constexpr uint32_t kLayOutThreads = 512;
constexpr uint32_t kScatterThreads = 256;
constexpr uint32_t kRouteRows = 16, kRouteColumns = 64, kRouteThreads = 128;
constexpr uint32_t kCombineColumns = 1024, kCombineThreads = 256;

struct RoutingShape {
    uint32_t rows, experts, top_k, normalize, shared, tile, capacity;
};

struct ExpertRowsShape {
    uint32_t experts, top_k, slots, width, shared_width, stride, hidden, group_shift, shared_group_shift,
        part;
};

// Blocks of the routed experts, of the shared one, or all.
enum Part : uint32_t { kAll, kRouted, kShared };

Tiling tiling_of(const ExpertShape& s, MatrixPath path, uint32_t rows) {
    return expert_tiling(path, rows, static_cast<uint64_t>(s.experts), static_cast<uint64_t>(s.top_k));
}

RoutingShape routing_shape(const ExpertShape& s, MatrixPath path, uint32_t rows) {
    const bool shared = s.shared_width > 0;
    const auto experts = static_cast<uint64_t>(s.experts);
    const auto top_k = static_cast<uint64_t>(s.top_k);
    const uint32_t tile = tiling_of(s, path, rows).rows;
    return {rows,
            static_cast<uint32_t>(experts),
            static_cast<uint32_t>(top_k),
            s.normalize ? 1u : 0u,
            shared ? 1u : 0u,
            tile,
            block_capacity(rows, experts, top_k, shared, tile)};
}

// Where the rows of each expert are listed.
struct Listed {
    Listed(const ExpertShape& s, MatrixPath path, uint32_t rows, const Buffers& buffers)
        : routing(routing_shape(s, path, rows)),
          entries(elements(buffers.entries, 0, size_t{rows} * static_cast<size_t>(s.slots()))),
          blocks(elements(buffers.blocks, 0, size_t{4} * routing.capacity)) {}
    RoutingShape routing;
    Range entries, blocks;
};

class RouteRows final : public Step {
  public:
    RouteRows(const Route& op, Builder& b)
        : normed_(op.normed),
          routing_(op.routing),
          eps_(op.eps),
          shape_(op.shape),
          buffers_(b.buffers),
          path_(b.path),
          element_(b.switches.activation_bytes()),
          in_(op.in),
          gain_(b.weights.vector(*op.norm)),
          norm_(op.in, gain_, op.eps, op.router, b),
          choose_(b.kernels.common(), "routing", "choose_rows"),
          lay_out_(b.kernels.common(), "routing", "lay_out"),
          scatter_(b.kernels.common(), "routing", "scatter_rows") {
        std::vector<Matrix> matrices{op.router};
        matrices.insert(matrices.end(), op.shared_gate.begin(), op.shared_gate.end());
        const DeviceMatrix* w = b.weights.stack(matrices);
        weights_ = w;
        route_.emplace(b.kernels.of(w->format), kFamily, "route_rows_" + w->format.name);
        b.sizes.at_least(&Sizes::picks, shape_.top_k);
        b.sizes.at_least(&Sizes::entries, shape_.slots());
        b.sizes.at_least(&Sizes::experts, shape_.experts);
        b.sizes.at_least(&Sizes::router_logits, w->rows);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const DeviceMatrix& w = *weights_;
        const auto top_k = static_cast<size_t>(shape_.top_k);
        const Listed listed(shape_, path_, rows, buffers_);
        norm_.encode(elements(buffers_.activations[size_t(normed_)], 0, size_t{rows} * w.cols, element_),
                     rows, pass);
        const Range logits = elements(buffers_.router_logits, 0, size_t{rows} * w.rows);
        pass.launch((*route_)(),
                    {reads(w.codes), reads(w.scales), reads(w.biases),
                     reads(elements(buffers_.activations[size_t(in_)], 0, size_t{rows} * w.cols)),
                     reads(*gain_), reads(elements(buffers_.inverses, 0, rows)), writes(logits),
                     constant(RowsShape{rows, w.cols, w.rows, w.rows, w.group_shift, eps_})},
                    {divided(w.rows, kRouteColumns), divided(rows, kRouteRows)}, {kRouteThreads},
                    w.matrix_bytes + as_bytes(uint64_t{rows} * w.rows * w.cols));
        const Range picks = elements(buffers_.picks, 0, rows * top_k);
        const Range counts =
            elements(buffers_.counts, 0, static_cast<size_t>(shape_.experts) * divided(rows, kChooseRows));
        const Range routing = elements(buffers_.activations[size_t(routing_)], 0,
                                       rows * (top_k + static_cast<size_t>(shape_.slots())));
        pass.launch(choose_(),
                    {reads(logits), writes(routing), writes(picks), writes(counts), constant(listed.routing)},
                    {divided(rows, kChooseRows)}, {kChooseThreads});
        pass.launch(lay_out_(), {updates(counts), writes(listed.blocks), constant(listed.routing)}, {1},
                    {kLayOutThreads});
        pass.launch(scatter_(),
                    {reads(picks), reads(counts), writes(listed.entries), constant(listed.routing)},
                    {divided(listed.entries.bytes / 4, kScatterThreads)}, {kScatterThreads});
    }

  private:
    Activation normed_, routing_;
    float eps_;
    ExpertShape shape_;
    const Buffers& buffers_;
    const MatrixPath& path_;
    size_t element_;
    Activation in_;
    const Placed* gain_;
    NormRows norm_;
    const DeviceMatrix* weights_;
    std::optional<OneKernel> route_;
    OneKernel choose_, lay_out_, scatter_;
};

// The experts of one direction: routed and shared, in one launch or two.
class ExpertProductRows : public Step {
  protected:
    ExpertProductRows(const ExpertShape& shape, int64_t hidden, const std::string& kernel,
                      const DeviceMatrix* routed, const DeviceMatrix* shared, Builder& b)
        : shape_(shape),
          hidden_(static_cast<uint32_t>(hidden)),
          buffers_(b.buffers),
          path_(b.path),
          element_(b.switches.activation_bytes()),
          routed_(routed),
          shared_(shared) {
        const auto add = [&](const DeviceMatrix* w, Part part) {
            launches_.push_back({TileKernels(b.kernels.of(w->format), kernel + "_" + w->format.name), part});
        };
        const bool together = !shared || shared->format == routed->format;
        add(routed, together ? kAll : kRouted);
        if (!together) add(shared, kShared);
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
                routed_->group_shift,
                shared_ ? shared_->group_shift : 5,
                part};
    }

    void launch(const Block& block, const Range& in, const Range& out, uint32_t groups, Pass& pass) const {
        const Listed listed(shape_, path_, block.rows, buffers_);
        const DeviceMatrix& r = *routed_;
        const DeviceMatrix& s = shared_ ? *shared_ : *routed_;
        const uint64_t products = pairs(block.rows) * r.rows * r.cols;
        const uint64_t chosen = std::min<uint64_t>(static_cast<uint64_t>(shape_.experts),
                                                   block.rows * static_cast<uint64_t>(shape_.top_k));
        const Tiling tile = tiling_of(shape_, path_, block.rows);
        for (const auto& [kernels, part] : launches_) {
            pass.launch(kernels(path_, tile),
                        {reads(r.codes), reads(r.scales), reads(r.biases), reads(s.codes), reads(s.scales),
                         reads(s.biases), reads(in), reads(listed.entries), reads(listed.blocks), writes(out),
                         constant(structure(part))},
                        {groups, listed.routing.capacity}, {tile.threads},
                        part == kShared ? s.matrix_bytes : chosen * r.matrix_bytes + as_bytes(products));
        }
    }

    struct Launch {
        TileKernels kernels;
        Part part;
    };
    ExpertShape shape_;
    uint32_t hidden_;
    const Buffers& buffers_;
    const MatrixPath& path_;
    size_t element_;
    const DeviceMatrix *routed_, *shared_;
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
               divided(stride(), tiling_of(shape_, path_, block.rows).pair_columns), pass);
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
          combine_(b.kernels.of(routed_->format), kFamily, "combine_rows") {
        b.sizes.at_least(&Sizes::down, op.shape.slots() * hidden_);
    }

    void encode(const Block& block, Pass& pass) const override {
        const Range down = elements(buffers_.down, 0, pairs(block.rows) * hidden_, element_);
        launch(block, elements(buffers_.activations[size_t(in_)], 0, pairs(block.rows) * stride(), element_),
               down, divided(hidden_, tiling_of(shape_, path_, block.rows).down_columns), pass);
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
