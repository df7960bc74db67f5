// Launches of metal/routing.metal and of the mixture's kernels in metal/matrix_simdgroup.metal.
#include <algorithm>
#include <cstring>
#include <optional>

#include "backend/metal/host_routing.h"
#include "backend/metal/rows.h"
#include "backend/metal/unfused.h"

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
    // Of an entry's activation between up and down.
    uint32_t stride() const { return static_cast<uint32_t>(std::max(shape_.width, shape_.shared_width)); }

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
        norm_.emplace(op.in, gain_, op.eps, *parts_[0].weights, b);
        b.sizes.at_least(&Sizes::picks, shape_.top_k);
        b.sizes.at_least(&Sizes::entries, shape_.slots());
        b.sizes.at_least(&Sizes::experts, shape_.experts);
        b.sizes.at_least(&Sizes::router_logits, columns_);
    }

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const size_t inputs = size_t{rows} * parts_[0].weights->cols;
        norm_->encode(elements(buffers_.activations[size_t(normed_)], 0, inputs, element_), rows, pass);
        for (const auto& [weights, first, kernel] : parts_) {
            const DeviceMatrix& w = *weights;
            const Range own = elements(buffers_.router_logits, first, size_t{rows - 1} * columns_ + w.rows);
            pass.launch(kernel(),
                        {reads(w.codes), reads(w.scales), reads(w.biases),
                         reads(elements(buffers_.activations[size_t(in_)], 0, inputs)), reads(*gain_),
                         reads(elements(buffers_.inverses, 0, rows)), writes(own),
                         constant(RowsShape{rows, w.cols, w.rows, columns_, w.group_shift, eps_})},
                        {divided(w.rows, kRouteColumns), divided(rows, kRouteRows)}, {kRouteThreads},
                        {.multiply_adds = uint64_t{rows} * w.rows * w.cols});
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
    std::optional<NormRows> norm_;
    std::vector<Part> parts_;
    uint32_t columns_ = 0;
    OneKernel choose_, lay_out_, scatter_;
};

// A product of the rows of a chunk with one matrix of their experts, or with gate and up: of the routed
// experts, of the shared one, or of both, in one launch or two.
class ExpertProduct {
  public:
    // `routed` or `shared` may be null: their blocks are left to others.
    ExpertProduct(const std::string& kernel, const ExpertShape& shape, int64_t hidden,
                  const DeviceMatrix* routed, const DeviceMatrix* shared, Builder& b)
        : shape_(shape), hidden_(static_cast<uint32_t>(hidden)), listing_(shape, b) {
        const auto add = [&](const Operand& operand, Part part) {
            const NumberFormat& format = operand.format();
            launches_.push_back({TileKernels(b.kernels.of(format), kernel + "_" + format.name), part});
        };
        if (routed) routed_.emplace(routed, static_cast<uint64_t>(shape.experts), 0, b);
        if (shared) shared_.emplace(shared, 1, routed_ ? routed_->end() : 0, b);
        if (routed && shared && routed->format == shared->format) {
            add(*routed_, kAll);
            return;
        }
        if (routed) add(*routed_, kRouted);
        if (shared) add(*shared_, kShared);
    }

    // `groups` threadgroups have all columns of an entry of `out`.
    void launch(const Range& in, const Range& out, uint32_t rows, uint32_t groups, Pass& pass) const {
        const auto [codes, scales, biases] = (routed_ ? *routed_ : *shared_).arguments();
        const auto [shared_codes, shared_scales, shared_biases] = (shared_ ? *shared_ : *routed_).arguments();
        const Tiling tile = listing_.tiling(rows);
        const Range entries = listing_.entries(rows), blocks = listing_.blocks(rows);
        if (routed_) routed_->expand(pass);
        if (shared_) shared_->expand(pass);
        for (const auto& [kernels, part] : launches_) {
            pass.launch(kernels(listing_.path(), tile),
                        {codes, scales, biases, shared_codes, shared_scales, shared_biases, reads(in),
                         reads(entries), reads(blocks), writes(out), constant(structure(part))},
                        {groups, listing_.routing(rows).capacity}, {tile.threads},
                        work(part, rows, in.bytes + entries.bytes + blocks.bytes, out.bytes));
        }
    }

    const NumberFormat& format() const { return (routed_ ? *routed_ : *shared_).format(); }
    ExpertRowsShape structure(Part part) const {
        return {static_cast<uint32_t>(shape_.experts),
                static_cast<uint32_t>(shape_.top_k),
                static_cast<uint32_t>(shape_.slots()),
                static_cast<uint32_t>(shape_.width),
                static_cast<uint32_t>(shape_.shared_width),
                listing_.stride(),
                hidden_,
                routed_ ? routed_->stored().group_shift : 5,
                shared_ ? shared_->stored().group_shift : 5,
                part};
    }

  private:
    struct Launch {
        TileKernels kernels;
        Part part;
    };

    // Each expert that has rows is read once; `read` and `written` are shared out by the part's entries.
    Work work(Part part, uint32_t rows, uint64_t read, uint64_t written) const {
        const auto slots = static_cast<uint64_t>(shape_.slots()), top_k = static_cast<uint64_t>(shape_.top_k);
        const uint64_t own = part == kAll ? slots : part == kRouted ? top_k : 1;
        Work work{.read = read * own / slots, .written = written * own / slots};
        const auto add = [&](const Operand& operand, uint64_t matrices, uint64_t multiplied) {
            work.read += matrices * operand.matrix_bytes();
            work.multiply_adds += multiplied * operand.stored().rows * operand.stored().cols;
        };
        if (part != kShared) add(*routed_, listing_.busy(rows), listing_.multiplied(rows));
        if (part != kRouted) add(*shared_, 1, rows);
        return work;
    }

    ExpertShape shape_;
    uint32_t hidden_;
    Listing listing_;
    std::optional<Operand> routed_, shared_;
    std::vector<Launch> launches_;
};

// Gate and up in one launch where they have one format; apart, a product each and SwiGLU of both.
class ExpertsUpRows final : public Step {
  public:
    ExpertsUpRows(const ExpertsUp& op, Builder& b)
        : in_(op.in),
          out_(op.out),
          shape_(op.shape),
          hidden_(static_cast<uint32_t>(op.gate[0].cols)),
          listing_(op.shape, b),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()) {
        const bool has_shared = !op.shared_gate.empty();
        routed_apart_ = !Weights::same_format(op.gate[0], op.up[0]);
        shared_apart_ = has_shared && !Weights::same_format(op.shared_gate[0], op.shared_up[0]);
        const auto stack = [&](bool wanted, std::vector<const ExpertMatrices*> parts) {
            return wanted ? b.weights.stack_experts(parts) : nullptr;
        };
        const bool routed_fuses = !routed_apart_, shared_fuses = has_shared && !shared_apart_;
        if (routed_fuses || shared_fuses) {
            both_.emplace("experts_up_rows", shape_, hidden_, stack(routed_fuses, {&op.gate, &op.up}),
                          stack(shared_fuses, {&op.shared_gate, &op.shared_up}), b);
        }
        if (!routed_apart_ && !shared_apart_) return;
        const DeviceMatrix* routed = stack(routed_apart_, {&op.gate});
        const DeviceMatrix* shared = stack(shared_apart_, {&op.shared_gate});
        gate_.emplace("experts_project_rows", shape_, hidden_, routed, shared, b);
        up_.emplace("experts_project_rows", shape_, hidden_, stack(routed_apart_, {&op.up}),
                    stack(shared_apart_, {&op.shared_up}), b);
        swiglu_.emplace(routed ? *routed : *shared, b);
        b.sizes.at_least(&Sizes::products, 2 * shape_.slots() * listing_.stride());
    }

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const size_t count = rows * static_cast<size_t>(shape_.slots()) * listing_.stride();
        const Tiling tile = listing_.tiling(block.rows);
        const Range in = elements(buffers_.activations[size_t(in_)], 0, rows * hidden_, element_);
        if (both_) {
            const Range out = elements(buffers_.activations[size_t(out_)], 0, count, element_);
            both_->launch(in, out, block.rows, divided(listing_.stride(), tile.pair_columns), pass);
        }
        if (!gate_) return;
        const uint32_t groups = divided(listing_.stride(), tile.expert_columns);
        gate_->launch(in, elements(buffers_.products, 0, count, element_), block.rows, groups, pass);
        up_->launch(in, elements(buffers_.products, count, count, element_), block.rows, groups, pass);
        if (routed_apart_ && shared_apart_ && shape_.width == shape_.shared_width) {
            multiply(0, shape_.slots(), shape_.width, block.rows, pass);
            return;
        }
        if (routed_apart_) multiply(0, shape_.top_k, shape_.width, block.rows, pass);
        if (shared_apart_) multiply(shape_.top_k, 1, shape_.shared_width, block.rows, pass);
    }

  private:
    // SwiGLU of so many entries per row: the shared expert's follow those of the others.
    void multiply(int64_t first, int64_t slots, int64_t width, uint32_t rows, Pass& pass) const {
        const uint32_t stride = listing_.stride(), row_stride = static_cast<uint32_t>(slots) * stride;
        const size_t begin = rows * static_cast<size_t>(first) * stride, count = size_t{rows} * row_stride;
        const size_t all = rows * static_cast<size_t>(shape_.slots()) * stride;
        swiglu_->encode(elements(buffers_.products, begin, count, element_),
                        elements(buffers_.products, all + begin, count, element_),
                        elements(buffers_.activations[size_t(out_)], begin, count, element_),
                        {static_cast<uint32_t>(width), stride, row_stride}, static_cast<uint32_t>(slots),
                        rows, pass);
    }

    Activation in_, out_;
    ExpertShape shape_;
    uint32_t hidden_;
    Listing listing_;
    const Buffers& buffers_;
    size_t element_;
    bool routed_apart_ = false, shared_apart_ = false;
    std::optional<ExpertProduct> both_, gate_, up_;
    std::optional<Swiglu> swiglu_;
};

class ExpertsDownRows final : public Step {
  public:
    ExpertsDownRows(const ExpertsDown& op, Builder& b)
        : in_(op.in),
          residual_(op.residual),
          routing_(op.routing),
          shape_(op.shape),
          hidden_(static_cast<uint32_t>(op.down[0].rows)),
          listing_(op.shape, b),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          product_("experts_down_rows", op.shape, hidden_,
                   b.weights.stack_experts(std::vector<const ExpertMatrices*>{&op.down}),
                   b.weights.stack_lists({&op.shared_down}), b),
          combine_(b.kernels.of(product_.format()), kFamily, "combine_rows") {
        b.sizes.at_least(&Sizes::products, op.shape.slots() * hidden_);
    }

    void encode(const Block& block, Pass& pass) const override {
        const size_t rows = block.rows;
        const size_t pairs = rows * static_cast<size_t>(shape_.slots());
        const Range down = elements(buffers_.products, 0, pairs * hidden_, element_);
        product_.launch(elements(buffers_.activations[size_t(in_)], 0, pairs * listing_.stride(), element_),
                        down, block.rows, divided(hidden_, listing_.tiling(block.rows).expert_columns), pass);
        const auto routing = static_cast<size_t>(shape_.top_k + shape_.slots());
        pass.launch(combine_(),
                    {reads(down), reads(elements(buffers_.activations[size_t(routing_)], 0, rows * routing)),
                     updates(elements(buffers_.activations[size_t(residual_)], 0, rows * hidden_)),
                     constant(product_.structure(kAll))},
                    {divided(hidden_, kCombineColumns), block.rows}, {kCombineThreads});
    }

  private:
    Activation in_, residual_, routing_;
    ExpertShape shape_;
    uint32_t hidden_;
    Listing listing_;
    const Buffers& buffers_;
    size_t element_;
    ExpertProduct product_;
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
