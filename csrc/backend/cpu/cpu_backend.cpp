#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "backend/cpu/kernels.h"
#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/routing.h"
#include "base/error.h"
#include "base/thread_pool.h"

namespace lily::cpu {
namespace {

// Best first.
constexpr const char* kInstructionSets[] = {"avx512vnni", "avxvnni", "avx2", "generic"};

class CpuBackend final : public Backend {
  public:
    explicit CpuBackend(const BackendOptions& options)
        : options_(options), kernels_(choose_kernels(options)), pool_(choose_threads(options)) {
        for (const std::string& name : options.ablate) {
            const bool known = name == "integer_dot" || name == "byte_dot" ||
                               std::find(std::begin(kInstructionSets), std::end(kInstructionSets), name) !=
                                   std::end(kInstructionSets);
            if (!known) {
                throw InvalidArgument(
                    "ablate: the CPU backend has nothing named '" + name +
                    "' to switch off; it has integer_dot, byte_dot, avx512vnni, avxvnni and avx2");
            }
        }
        integer_dot_ = !options.ablate.contains("integer_dot");
        byte_dot_ = !options.ablate.contains("byte_dot");
        scratch_.resize(static_cast<size_t>(pool_.threads()));
    }

    void prepare(const Plan& plan) override {
        widths_.assign(plan.activation_widths.begin(), plan.activation_widths.end());
        max_rows_ = plan.max_rows;
        activations_.clear();
        activations_.resize(widths_.size());
    }

    bool run(std::span<const Op> ops, const Batch& batch) override {
        const auto rows = static_cast<int64_t>(batch.tokens.size());
        if (rows > max_rows_) throw BackendError("a batch of " + std::to_string(rows) + " rows is too large");
        for (size_t i = 0; i < widths_.size(); ++i)
            activations_[i].ensure(static_cast<size_t>(rows * widths_[i]));
        by_bytes_ = byte_dot_ && rows <= kMaxByteRows;
        for (const Op& op : ops) {
            if (batch.stop && (*batch.stop)()) return false;
            std::visit([&](const auto& o) { apply(o, batch, rows); }, op);
        }
        return true;
    }

    std::string describe() const override {
        return std::string("cpu (") + kernels_.name + ", " + std::to_string(pool_.threads()) +
               (pool_.threads() == 1 ? " thread)" : " threads)");
    }

    std::vector<float> read_activation(Activation activation, int64_t first, int64_t rows) override {
        const int64_t w = width(activation);
        const float* begin = data(activation) + first * w;
        return {begin, begin + rows * w};
    }

  private:
    struct Product {  // one matrix and where its rows go in each output row
        const Matrix* weight;
        int64_t offset;
    };

    static const Kernels& choose_kernels(const BackendOptions& options) {
        const Kernels* found = nullptr;
        for (const char* name : kInstructionSets) {
            if (!found && !options.ablate.contains(name)) found = find_kernels(name);
        }
        if (!found)
            throw BackendError("no CPU kernels are left to run: every instruction set is switched off");
        return *found;
    }

    static int choose_threads(const BackendOptions& options) {
        if (options.threads > 0) return options.threads;
        return std::max(1u, std::thread::hardware_concurrency());
    }

    int64_t width(Activation a) const { return widths_[static_cast<size_t>(a)]; }
    float* data(Activation a) { return activations_[static_cast<size_t>(a)].data(); }

    float* scratch(int thread, int64_t floats) {
        Buffer<float>& buffer = scratch_[static_cast<size_t>(thread)];
        buffer.ensure(static_cast<size_t>(floats));
        return buffer.data();
    }

    // Integer dot products where the stored form has them, fp32 elsewhere.
    bool by_integers(const Matrix& w) const {
        return integer_dot_ && w.quantized() && w.format != Format::mxfp8 && w.cols % 32 == 0;
    }

    void multiply(const MatrixTask& task) const {
        by_integers(*task.weight) ? kernels_.matrix_integer(task) : kernels_.matrix_float(task);
    }

    // Work items per claim: a few claims per thread, so that a slow thread is made up for by the others.
    int64_t grain(int64_t items, int64_t least = 1) const {
        return std::clamp<int64_t>(items / (pool_.threads() * 8), least, 16);
    }

    // body over the items, on all threads if it moves enough bytes to be worth waking them.
    template <typename Body>
    void spread(int64_t items, int64_t grain, int64_t bytes, Body&& body) {
        if (bytes < kAloneBytes) {
            if (items > 0) body(0, items, 0);
        } else {
            pool_.run(items, grain, body);
        }
    }

    template <typename Prepare>
    void prepare_rows(int64_t rows, Prepare&& one) {
        const auto body = [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) one(row);
        };
        if (rows < kRowsAlone) return body(0, rows, 0);
        pool_.run(rows, grain(rows), body);
    }

    // x as the products need it. `quantized` holds the integers afterwards.
    void quantize(const float* x, int64_t rows, int64_t cols, bool integers, QuantizedRows& quantized) {
        quantized.shape(x, rows, cols, integers, by_bytes_);
        if (integers) prepare_rows(rows, [&](int64_t row) { quantized.quantize(kernels_, row); });
    }

    bool any_integers(std::span<const Product> products) const {
        return std::any_of(products.begin(), products.end(),
                           [&](const Product& p) { return by_integers(*p.weight); });
    }

    // out[row][offset ..] = W x[row] for every product.
    void project(std::span<const Product> products, const QuantizedRows& x, int64_t rows,
                 const int32_t* row_index, float* out, int64_t out_stride) {
        int64_t panels = 0;
        int64_t bytes = 0;
        for (const Product& p : products) {
            panels += panel_count(*p.weight);
            bytes += p.weight->bytes() * rows;
        }
        spread(panels, grain(panels, kMaxPanels), bytes, [&](int64_t begin, int64_t end, int thread) {
            int64_t skipped = 0;
            for (const Product& p : products) {
                const int64_t count = panel_count(*p.weight);
                const int64_t from = std::max(begin - skipped, int64_t{0});
                const int64_t to = std::min(end - skipped, count);
                skipped += count;
                for (int64_t panel = from; panel < to; panel += kMaxPanels) {
                    multiply({.weight = p.weight,
                              .first_row = panel * kPanel,
                              .panels = std::min(kMaxPanels, to - panel),
                              .x = &x.view(),
                              .row_index = row_index,
                              .count = rows,
                              .out = out + p.offset + panel * kPanel,
                              .out_stride = out_stride,
                              .scratch = scratch(thread, kernels_.matrix_scratch_floats(p.weight->cols))});
                }
            }
        });
    }

    static constexpr int64_t kWide = kMaxPanels * kPanel;  // outputs of an expert per work item

    static int64_t panels_in(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
    static int64_t panel_count(const Matrix& w) { return panels_in(w.rows); }

    // normed_[row] = rms(in[row]) * norm
    const float* normalize(const float* in, int64_t cols, const Vector& norm, float eps, int64_t rows) {
        normed_.ensure(static_cast<size_t>(rows * cols));
        prepare_rows(rows, [&](int64_t row) {
            kernels_.rms_norm(in + row * cols, norm->data(), eps, cols, normed_.data() + row * cols);
        });
        return normed_.data();
    }

    void norm_project(const float* in, int64_t cols, const Vector& norm, float eps,
                      std::span<const Product> products, int64_t rows, float* out, int64_t out_stride) {
        const float* x = normalize(in, cols, norm, eps, rows);
        quantize(x, rows, cols, any_integers(products), rows_);
        project(products, rows_, rows, nullptr, out, out_stride);
    }

    void apply(const Embed& op, const Batch& batch, int64_t rows) {
        const int64_t w = op.table.cols;
        float* out = data(op.out);
        prepare_rows(rows, [&](int64_t row) {
            kernels_.read_row(op.table, batch.tokens[static_cast<size_t>(row)], out + row * w);
        });
    }

    void apply(const NormProject& op, const Batch&, int64_t rows) {
        std::vector<Product> products;
        int64_t offset = 0;
        for (const Matrix& w : op.weights) {
            products.push_back({&w, offset});
            offset += w.rows;
        }
        norm_project(data(op.in), width(op.in), op.norm, op.eps, products, rows, data(op.out), offset);
    }

    void apply(const DeltaRule& op, const Batch& batch, int64_t rows) {
        const DeltaShape& s = op.shape;
        const int64_t taps = s.conv_width - 1;
        mixed_.ensure(static_cast<size_t>(rows * s.channels()));
        for (const Segment& segment : batch.segments) {
            const float* projected = data(op.in) + segment.first_row * s.projected();
            float* mixed = mixed_.data() + segment.first_row * s.channels();
            float* history = segment.sequence->recurrent().conv(op.state);
            float* state = segment.sequence->recurrent().matrices(op.state);
            float* out = data(op.out) + segment.first_row * s.values();
            const int64_t pieces = (s.channels() + kConvPiece - 1) / kConvPiece;
            const auto convolve = [&](int64_t begin, int64_t end, int) {
                kernels_.convolve(op, projected, history, segment.rows, begin * kConvPiece,
                                  std::min(end * kConvPiece, s.channels()), mixed);
            };
            spread(pieces, 1, segment.rows * s.channels() * 4, convolve);
            remember_inputs(projected, s.projected(), segment.rows, taps, s.channels(), history);
            prepare_rows(segment.rows,
                         [&](int64_t row) { kernels_.normalize_heads(op, mixed + row * s.channels()); });
            const int64_t state_bytes = s.value_heads * s.key_dim * s.value_dim * 4;
            spread(s.value_heads, 1, state_bytes * segment.rows, [&](int64_t begin, int64_t end, int) {
                for (int64_t head = begin; head < end; ++head) {
                    kernels_.delta_rule({.op = &op,
                                         .head = head,
                                         .mixed = mixed,
                                         .projected = projected,
                                         .rows = segment.rows,
                                         .state = state + head * s.key_dim * s.value_dim,
                                         .out = out});
                }
            });
        }
    }

    // The last `taps` inputs of the convolution, oldest first.
    static void remember_inputs(const float* projected, int64_t stride, int64_t rows, int64_t taps,
                                int64_t channels, float* history) {
        const int64_t kept = std::max<int64_t>(0, taps - rows);
        std::memmove(history, history + (taps - kept) * channels,
                     static_cast<size_t>(kept * channels) * sizeof(float));
        for (int64_t i = kept; i < taps; ++i) {
            std::memcpy(history + i * channels, projected + (rows - taps + i) * stride,
                        static_cast<size_t>(channels) * sizeof(float));
        }
    }

    void apply(const RotaryAppend& op, const Batch& batch, int64_t) {
        const int64_t stride = op.shape.projected();
        for (const Segment& segment : batch.segments) {
            float* first = data(op.projected) + segment.first_row * stride;
            const int64_t position = segment.sequence->length();
            prepare_rows(segment.rows, [&](int64_t row) {
                kernels_.rotary_append(op, first + row * stride, position + row, segment.sequence->kv());
            });
        }
    }

    void apply(const Attend& op, const Batch& batch, int64_t) {
        const AttentionShape& s = op.shape;
        for (const Segment& segment : batch.segments) {
            const int64_t pieces = (segment.rows + kAttendRows - 1) / kAttendRows;
            const int64_t length = segment.sequence->length() + segment.rows;
            spread(s.kv_heads * pieces, 1, 4 * s.keys() * length * segment.rows,
                   [&](int64_t begin, int64_t end, int thread) {
                       for (int64_t item = begin; item < end; ++item) {
                           const int64_t row = item / s.kv_heads * kAttendRows;
                           kernels_.attend(
                               {.shape = &s,
                                .cache = &segment.sequence->kv(),
                                .layer = op.cache,
                                .kv_head = item % s.kv_heads,
                                .projected = data(op.projected) + (segment.first_row + row) * s.projected(),
                                .stride = s.projected(),
                                .rows = std::min(kAttendRows, segment.rows - row),
                                .position = segment.sequence->length() + row,
                                .out = data(op.out) + (segment.first_row + row) * s.queries(),
                                .out_stride = s.queries(),
                                .scratch = scratch(thread, kernels_.attention_scratch_floats(s))});
                       }
                   });
        }
    }

    void apply(const ProjectAdd& op, const Batch&, int64_t rows) {
        const Product product{&op.weight, 0};
        const std::span<const Product> products(&product, 1);
        quantize(data(op.in), rows, op.weight.cols, any_integers(products), rows_);
        const int64_t w = op.weight.rows;
        product_.ensure(static_cast<size_t>(rows * w));
        project(products, rows_, rows, nullptr, product_.data(), w);
        prepare_rows(rows, [&](int64_t row) {
            kernels_.add_scaled(product_.data() + row * w, 1.0f, w, data(op.residual) + row * w);
        });
    }

    void apply(const Route& op, const Batch&, int64_t rows) {
        const int64_t cols = width(op.in);
        float* normed = data(op.normed);
        prepare_rows(rows, [&](int64_t row) {
            kernels_.rms_norm(data(op.in) + row * cols, op.norm->data(), op.eps, cols, normed + row * cols);
        });
        std::vector<Product> products{{&op.router, 0}};
        for (const Matrix& gate : op.shared_gate) products.push_back({&gate, op.shape.experts});
        quantize(normed, rows, cols, any_integers(products), rows_);
        const int64_t stride = op.shape.experts + 1;
        product_.ensure(static_cast<size_t>(rows * stride));
        project(products, rows_, rows, nullptr, product_.data(), stride);
        prepare_rows(rows, [&](int64_t row) {
            route_row(op.shape, product_.data() + row * stride, data(op.routing) + row * width(op.routing));
        });
        groups_.build(op.shape, data(op.routing), width(op.routing), rows);
    }

    void apply(const ExpertsUp& op, const Batch&, int64_t rows) {
        const ExpertShape& s = op.shape;
        const int64_t slot_width = std::max(s.width, s.shared_width);
        const Product sample[] = {{&op.gate[0], 0}, {&op.up[0], 0}};
        quantize(data(op.in), rows, width(op.in), any_integers(sample) || shared_by_integers(op.shared_gate),
                 rows_);
        const auto& loads = groups_.loads();
        items_.clear();
        int64_t most = 0;
        for (size_t i = 0; i < loads.size(); ++i) {
            const int64_t outputs = loads[i].expert < s.experts ? s.width : s.shared_width;
            for (int64_t row = 0; row < outputs; row += kWide) items_.push_back({i, row});
            most = std::max(most, loads[i].count);
        }
        pair_rows_.resize(static_cast<size_t>(rows * s.slots()));
        const int32_t* base = loads.front().pairs;
        for (size_t i = 0; i < pair_rows_.size(); ++i)
            pair_rows_[i] = base[i] / static_cast<int32_t>(s.slots());
        const auto items = static_cast<int64_t>(items_.size());
        spread(items, grain(items), 2 * op.gate[0].bytes() * rows * s.top_k,
               [&](int64_t begin, int64_t end, int thread) {
                   for (int64_t item = begin; item < end; ++item) {
                       const auto& [index, first] = items_[static_cast<size_t>(item)];
                       const ExpertLoad& load = loads[index];
                       const bool shared = load.expert == s.experts;
                       const Matrix& gate =
                           shared ? op.shared_gate[0] : op.gate[static_cast<size_t>(load.expert)];
                       const Matrix& up = shared ? op.shared_up[0] : op.up[static_cast<size_t>(load.expert)];
                       const int64_t room = kernels_.matrix_scratch_floats(gate.cols);
                       float* space = scratch(thread, room + 2 * most * kWide);
                       float* results[2] = {space + room, space + room + most * kWide};
                       const int64_t valid = std::min(kWide, gate.rows - first);
                       const int32_t* row_index = pair_rows_.data() + (load.pairs - base);
                       for (int side = 0; side < 2; ++side) {
                           multiply({.weight = side == 0 ? &gate : &up,
                                     .first_row = first,
                                     .panels = panels_in(valid),
                                     .x = &rows_.view(),
                                     .row_index = row_index,
                                     .count = load.count,
                                     .out = results[side],
                                     .out_stride = kWide,
                                     .scratch = space});
                       }
                       for (int64_t i = 0; i < load.count; ++i) {
                           kernels_.swiglu(results[0] + i * kWide, results[1] + i * kWide, valid,
                                           data(op.out) + load.pairs[i] * slot_width + first);
                       }
                   }
               });
    }

    bool shared_by_integers(const std::vector<Matrix>& shared) const {
        return !shared.empty() && by_integers(shared[0]);
    }

    void apply(const ExpertsDown& op, const Batch&, int64_t rows) {
        const ExpertShape& s = op.shape;
        const int64_t slots = s.slots();
        const int64_t slot_width = std::max(s.width, s.shared_width);
        const int64_t hidden = op.down[0].rows;
        const bool integers = by_integers(op.down[0]) || shared_by_integers(op.shared_down);
        // Slots of unequal width are read as rows of their own width.
        const bool equal = s.shared_width == 0 || s.shared_width == s.width;
        quantize(data(op.in), rows * slots, slot_width, integers && equal, rows_);
        if (!equal) quantize_uneven(op, rows, integers);
        product_.ensure(static_cast<size_t>(rows * slots * hidden));
        const auto& loads = groups_.loads();
        const int64_t pieces = (hidden + kWide - 1) / kWide;
        const int64_t items = static_cast<int64_t>(loads.size()) * pieces;
        spread(items, grain(items), op.down[0].bytes() * rows * s.top_k,
               [&](int64_t begin, int64_t end, int thread) {
                   for (int64_t item = begin; item < end; ++item) {
                       const ExpertLoad& load = loads[static_cast<size_t>(item / pieces)];
                       const bool shared = load.expert == s.experts;
                       const Matrix& down =
                           shared ? op.shared_down[0] : op.down[static_cast<size_t>(load.expert)];
                       const int64_t first = item % pieces * kWide;
                       const int64_t valid = std::min(kWide, hidden - first);
                       const int64_t room = kernels_.matrix_scratch_floats(down.cols);
                       float* space = scratch(thread, room + load.count * kWide);
                       float* result = space + room;
                       multiply({.weight = &down,
                                 .first_row = first,
                                 .panels = panels_in(valid),
                                 .x = equal    ? &rows_.view()
                                      : shared ? &shared_rows_.view()
                                               : &routed_rows_.view(),
                                 .row_index = load.pairs,
                                 .count = load.count,
                                 .out = result,
                                 .out_stride = kWide,
                                 .scratch = space});
                       for (int64_t i = 0; i < load.count; ++i) {
                           std::memcpy(product_.data() + load.pairs[i] * hidden + first, result + i * kWide,
                                       static_cast<size_t>(valid) * sizeof(float));
                       }
                   }
               });
        prepare_rows(rows, [&](int64_t row) {
            const RoutingRow routing(data(op.routing) + row * width(op.routing), s.top_k);
            float* sum = product_.data() + row * slots * hidden;  // slot 0's result becomes the sum
            const float first = routing.weight(0);
            for (int64_t i = 0; i < hidden; ++i) sum[i] *= first;
            for (int64_t slot = 1; slot < slots; ++slot) {
                kernels_.add_scaled(sum + slot * hidden, routing.weight(slot), hidden, sum);
            }
            kernels_.add_scaled(sum, 1.0f, hidden, data(op.residual) + row * hidden);
        });
    }

    // Routed and shared experts of unequal width: each slot's row is copied to rows of its own width.
    void quantize_uneven(const ExpertsDown& op, int64_t rows, bool integers) {
        const ExpertShape& s = op.shape;
        const int64_t pairs = rows * s.slots();
        const int64_t slot_width = std::max(s.width, s.shared_width);
        const auto gather = [&](int64_t cols, Buffer<float>& values, QuantizedRows& quantized) {
            values.ensure(static_cast<size_t>(pairs * cols));
            prepare_rows(pairs, [&](int64_t pair) {
                std::memcpy(values.data() + pair * cols, data(op.in) + pair * slot_width,
                            static_cast<size_t>(cols) * sizeof(float));
            });
            quantize(values.data(), pairs, cols, integers, quantized);
        };
        gather(s.width, routed_values_, routed_rows_);
        gather(s.shared_width, shared_values_, shared_rows_);
    }

    void apply(const NormGateUp& op, const Batch&, int64_t rows) {
        const int64_t w = op.gate.rows;
        const Product products[] = {{&op.gate, 0}, {&op.up, w}};
        product_.ensure(static_cast<size_t>(rows * 2 * w));
        norm_project(data(op.in), width(op.in), op.norm, op.eps, products, rows, product_.data(), 2 * w);
        prepare_rows(rows, [&](int64_t row) {
            const float* gate = product_.data() + row * 2 * w;
            kernels_.swiglu(gate, gate + w, w, data(op.out) + row * w);
        });
    }

    void apply(const Head& op, const Batch& batch, int64_t rows) {
        const int64_t cols = width(op.in);
        float* hidden = data(op.hidden);
        prepare_rows(rows, [&](int64_t row) {
            kernels_.rms_norm(data(op.in) + row * cols, op.norm->data(), op.eps, cols, hidden + row * cols);
        });
        if (batch.logit_rows.empty()) return;
        const Product product{&op.weight, 0};
        const std::span<const Product> products(&product, 1);
        const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
        rows_.shape(hidden, rows, cols, any_integers(products), by_bytes_);
        if (any_integers(products)) {
            prepare_rows(wanted, [&](int64_t i) {
                rows_.quantize(kernels_, batch.logit_rows[static_cast<size_t>(i)]);
            });
        }
        project(products, rows_, wanted, batch.logit_rows.data(), batch.logits, op.weight.rows);
    }

    void apply(const CombineHidden& op, const Batch&, int64_t rows) {
        const int64_t h = width(op.embedding);
        normed_.ensure(static_cast<size_t>(rows * 2 * h));
        prepare_rows(rows, [&](int64_t row) {
            float* out = normed_.data() + row * 2 * h;
            kernels_.rms_norm(data(op.embedding) + row * h, op.embedding_norm->data(), op.eps, h, out);
            kernels_.rms_norm(data(op.hidden) + row * h, op.hidden_norm->data(), op.eps, h, out + h);
        });
        const Product product{&op.weight, 0};
        const std::span<const Product> products(&product, 1);
        quantize(normed_.data(), rows, 2 * h, any_integers(products), rows_);
        project(products, rows_, rows, nullptr, data(op.out), h);
    }

    // Waking the threads costs about two microseconds, in which one thread streams this much from cache.
    static constexpr int64_t kAloneBytes = 128 << 10;
    static constexpr int64_t kRowsAlone = 8;
    static constexpr int64_t kConvPiece = 256;  // channels per work item
    static constexpr int64_t kAttendRows = 4;   // query rows per work item

    struct PanelItem {
        size_t load;
        int64_t first_row;
    };

    BackendOptions options_;
    const Kernels& kernels_;
    ThreadPool pool_;
    bool integer_dot_ = true;
    bool byte_dot_ = true;
    bool by_bytes_ = false;  // this batch is small enough for the byte kernels
    std::vector<int64_t> widths_;
    int64_t max_rows_ = 0;
    std::vector<Buffer<float>> activations_;
    std::vector<Buffer<float>> scratch_;  // per thread
    QuantizedRows rows_, routed_rows_, shared_rows_;
    Buffer<float> routed_values_, shared_values_;
    Buffer<float> normed_, product_, mixed_;
    ExpertGroups groups_;  // of the last Route
    std::vector<PanelItem> items_;
    std::vector<int32_t> pair_rows_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
    return std::make_unique<CpuBackend>(options);
}

}  // namespace lily::cpu
