// The CPU backend: cuts fused operations into pieces for the threads and calls the kernels of the best
// instruction set.
//
// cpu_backend.cpp has products and what is made of them, mixers.cpp the sequence mixers, experts.cpp the
// mixture of experts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/routing.h"
#include "base/buffer.h"
#include "base/thread_pool.h"

namespace lily::cpu {

// What the CPU backend can do without (backend/ablation.h). Only integer_dot changes a bit.
struct Switches {
    bool integer_dot = true;        // weights are multiplied as integers, not expanded to fp32
    bool byte_dot = true;           // one or two rows meet the codes as bytes
    bool expanded_panels = true;    // more than eight rows share panels expanded into cache
    bool expert_groups = true;      // rows that chose the same expert share its weights
    bool attention_vectors = true;  // attention uses the machine's instruction set, not plain C++
    bool attention_spans = true;    // attention of few rows is shared out by spans of keys
    bool prefetch = true;           // the next panel or page is asked for while one is read
    bool spin = true;               // threads wait a moment for the next operation before they sleep

    // InvalidArgument for a name that is neither one of these nor an instruction set.
    explicit Switches(const std::set<std::string>& ablate);
};

// Inputs of the delta rule: of each layer, [rows, projected].
class DeltaTape final : public Tape {
  public:
    void keep(int layer, const float* rows, int64_t floats) {
        const auto index = static_cast<size_t>(layer);
        if (index >= layers_.size()) layers_.resize(index + 1);
        layers_[index].assign(rows, rows + floats);
    }
    const float* rows(int layer) const { return layers_[static_cast<size_t>(layer)].data(); }

  private:
    std::vector<std::vector<float>> layers_;
};

class CpuBackend final : public Backend {
  public:
    explicit CpuBackend(const BackendOptions& options);

    void prepare(const Plan& plan) override;
    bool run(std::span<const Op> ops, const Batch& batch) override;
    std::unique_ptr<Tape> new_tape() const override { return std::make_unique<DeltaTape>(); }
    void advance(std::span<const Op> ops, Sequence& sequence, const Tape& tape, int64_t rows) override;
    std::string describe() const override;
    // "nanoseconds of Attend", "bytes of Attend": of weights and states, as if each row read its own.
    std::map<std::string, uint64_t> counts() const override;
    std::vector<float> read_activation(Activation activation, int64_t first, int64_t rows) override;

  private:
    struct Product {  // one matrix and where its rows go in each output row
        const Matrix* weight;
        int64_t offset;
    };

    void apply(const Embed& op, const Batch& batch, int64_t rows);
    void apply(const NormProject& op, const Batch& batch, int64_t rows);
    void apply(const DeltaRule& op, const Batch& batch, int64_t rows);
    void apply(const RotaryAppend& op, const Batch& batch, int64_t rows);
    void apply(const Attend& op, const Batch& batch, int64_t rows);
    void apply(const ProjectAdd& op, const Batch& batch, int64_t rows);
    void apply(const Route& op, const Batch& batch, int64_t rows);
    void apply(const ExpertsUp& op, const Batch& batch, int64_t rows);
    void apply(const ExpertsDown& op, const Batch& batch, int64_t rows);
    void apply(const NormGateUp& op, const Batch& batch, int64_t rows);
    void apply(const Head& op, const Batch& batch, int64_t rows);
    void apply(const CombineHidden& op, const Batch& batch, int64_t rows);

    int64_t width(Activation a) const { return widths_[static_cast<size_t>(a)]; }
    float* data(Activation a) { return activations_[static_cast<size_t>(a)].data(); }

    float* scratch(int thread, int64_t floats) {
        Buffer<float>& buffer = scratch_[static_cast<size_t>(thread)];
        buffer.ensure(static_cast<size_t>(floats));
        return buffer.data();
    }

    // body over the items, on all threads if it moves enough bytes to be worth waking them.
    template <typename Body>
    void spread(int64_t items, int64_t unit, int64_t bytes, Body&& body) {
        bytes_ += static_cast<uint64_t>(bytes);
        if (bytes >= kAloneBytes) return pool_.run(items, unit, body);
        if (items > 0) body(Piece{0, items, items, 0});
    }

    template <typename One>
    void prepare_rows(int64_t rows, One&& one) {
        const auto body = [&](const Piece& piece) {
            for (int64_t row = piece.begin; row < piece.end; ++row) one(row);
        };
        if (rows >= kRowsAlone) return pool_.run(rows, 1, body);
        body(Piece{0, rows, rows, 0});
    }

    // Integer dot products where the stored form has them, fp32 elsewhere.
    bool by_integers(const Matrix& w) const {
        return switches_.integer_dot && w.quantized() && w.format != Format::mxfp8 && w.cols % 32 == 0;
    }
    bool any_integers(std::span<const Product> products) const {
        return std::any_of(products.begin(), products.end(),
                           [&](const Product& p) { return by_integers(*p.weight); });
    }
    bool shared_by_integers(const std::vector<Matrix>& shared) const {
        return !shared.empty() && by_integers(shared[0]);
    }
    static int64_t shared_bytes(const std::vector<Matrix>& shared) {
        return shared.empty() ? 0 : shared[0].bytes();
    }
    void multiply(MatrixTask task) const;

    // out[row] = rms(in[row]) * norm
    void normalize(const float* in, int64_t cols, const Vector& norm, float eps, int64_t rows, float* out);
    // x as the products need it. `quantized` holds the integers afterwards.
    void quantize(const float* x, int64_t rows, int64_t cols, bool integers, QuantizedRows& quantized);
    // out[row][offset ..] = W x[row] for every product.
    void project(std::span<const Product> products, const QuantizedRows& x, int64_t rows,
                 const int32_t* row_index, float* out, int64_t out_stride);
    void norm_project(Activation in, const Vector& norm, float eps, std::span<const Product> products,
                      int64_t rows, float* out, int64_t out_stride);
    // Routed and shared experts of unequal width: each slot's row is copied to rows of its own width.
    void quantize_uneven(const ExpertsDown& op, int64_t rows, bool integers);
    // Cosines and sines of the positions of a batch's rows, [rows, rotary_dim].
    void prepare_angles(const AttentionShape& shape, const Batch& batch, int64_t rows);

    // The delta rule on rows of inputs.
    void scan(const DeltaRule& op, std::span<const Segment> segments, const float* in, int64_t rows);

    // Attention of few rows: each span of keys on its own, joined afterwards.
    void attend_by_spans(const Attend& op, int64_t floats, int64_t bytes);

    static int64_t panels_in(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

    // Waking the threads costs about two microseconds, in which one thread streams this much from cache.
    static constexpr int64_t kAloneBytes = 128 << 10;
    static constexpr int64_t kRowsAlone = 8;
    static constexpr int64_t kWide = kMaxPanels * kPanel;  // outputs of an expert per work item

    struct Rotation {  // what rotary angles depend on beside positions
        double theta = 0.0;
        int64_t dim = 0;
        bool operator==(const Rotation&) const = default;
    };
    struct Spent {  // on operations of one kind
        std::string_view name;
        uint64_t nanoseconds = 0, bytes = 0;
    };
    struct ExpertItem {
        size_t load;
        int64_t first_row;
    };
    struct AttentionItem {
        size_t task;
        int64_t span;
    };

    Switches switches_;
    const Kernels& kernels_;
    const Kernels& attention_kernels_;
    ThreadPool pool_;
    bool by_bytes_ = false;  // this batch is small enough for the byte kernels
    std::array<Spent, std::variant_size_v<Op>> spent_;
    uint64_t bytes_ = 0;  // so far
    std::vector<int64_t> widths_;
    int64_t max_rows_ = 0;
    std::vector<Buffer<float>> activations_;
    std::vector<Buffer<float>> scratch_;  // per thread
    QuantizedRows rows_, routed_rows_, shared_rows_;
    Buffer<float> routed_values_, shared_values_;
    Buffer<float> normed_, product_, mixed_;
    Buffer<float> angles_;
    Rotation angles_of_;   // none before a batch's first rotary operation
    ExpertGroups groups_;  // of the last Route
    std::vector<ExpertItem> expert_items_;
    std::vector<int32_t> pair_rows_;
    std::vector<AttentionTask> attention_tasks_;
    std::vector<AttentionItem> attention_items_;
    Buffer<float> partials_;
};

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace lily::cpu
