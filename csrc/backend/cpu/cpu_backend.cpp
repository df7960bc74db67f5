#include "backend/cpu/cpu_backend.h"

#include <chrono>
#include <thread>
#include <utility>

#include "backend/ablation.h"
#include "base/error.h"

namespace lily::cpu {
namespace {

// Best first.
constexpr const char* kInstructionSets[] = {"avx512vnni", "avxvnni", "avx2", "neon", "generic"};

constexpr Technique<Switches> kTechniques[] = {
    {"integer_dot", &Switches::integer_dot},
    {"byte_dot", &Switches::byte_dot},
    {"expanded_panels", &Switches::expanded_panels},
    {"expert_groups", &Switches::expert_groups},
    {"attention_vectors", &Switches::attention_vectors},
    {"attention_spans", &Switches::attention_spans},
    {"prefetch", &Switches::prefetch},
    {"spin", &Switches::spin},
};

const Kernels& choose_kernels(const std::set<std::string>& off) {
    for (const char* name : kInstructionSets) {
        if (off.contains(name)) continue;
        if (const Kernels* found = find_kernels(name)) return *found;
    }
    throw BackendError("no CPU kernels are left to run: every instruction set is switched off");
}

int choose_threads(int threads) {
    return threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

Switches::Switches(const std::set<std::string>& ablate) {
    switch_off<Switches>(*this, kTechniques, ablate, "CPU", kInstructionSets);
}

CpuBackend::CpuBackend(const BackendOptions& options)
    : switches_(options.ablate),
      kernels_(choose_kernels(options.ablate)),
      attention_kernels_(switches_.attention_vectors ? kernels_ : *find_kernels("generic")),
      pool_(choose_threads(options.threads), switches_.spin),
      scratch_(static_cast<size_t>(pool_.threads())) {}

void CpuBackend::prepare(const Plan& plan) {
    widths_.assign(plan.activation_widths.begin(), plan.activation_widths.end());
    max_rows_ = plan.max_rows;
    activations_.clear();
    activations_.resize(widths_.size());
}

bool CpuBackend::run(std::span<const Op> ops, const Batch& batch) {
    const auto rows = static_cast<int64_t>(batch.tokens.size());
    if (rows > max_rows_) throw BackendError("a batch of " + std::to_string(rows) + " rows is too large");
    for (size_t i = 0; i < widths_.size(); ++i)
        activations_[i].ensure(static_cast<size_t>(rows * widths_[i]));
    by_bytes_ = switches_.byte_dot && rows <= kMaxByteRows;
    angles_of_ = {};
    for (const Op& op : ops) {
        if (batch.stop && (*batch.stop)()) return false;
        const auto begin = std::chrono::steady_clock::now();
        const uint64_t bytes = bytes_;
        std::visit([&](const auto& o) { apply(o, batch, rows); }, op);
        Spent& spent = spent_[op.index()];
        spent.name = op_name(op);
        spent.nanoseconds +=
            static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
        spent.bytes += bytes_ - bytes;
    }
    return true;
}

std::map<std::string, uint64_t> CpuBackend::counts() const {
    std::map<std::string, uint64_t> counts;
    for (const Spent& spent : spent_) {
        if (spent.name.empty()) continue;
        counts["nanoseconds of " + std::string(spent.name)] = spent.nanoseconds;
        counts["bytes of " + std::string(spent.name)] = spent.bytes;
    }
    return counts;
}

std::string CpuBackend::describe() const {
    return std::string("cpu (") + kernels_.name + ", " + std::to_string(pool_.threads()) +
           (pool_.threads() == 1 ? " thread)" : " threads)");
}

std::vector<float> CpuBackend::read_activation(Activation activation, int64_t first, int64_t rows) {
    const int64_t w = width(activation);
    const float* begin = data(activation) + first * w;
    return {begin, begin + rows * w};
}

void CpuBackend::multiply(MatrixTask task) const {
    task.prefetch = switches_.prefetch;
    task.expand = switches_.expanded_panels;
    by_integers(*task.weight) ? kernels_.matrix_integer(task) : kernels_.matrix_float(task);
}

void CpuBackend::normalize(const float* in, int64_t cols, const Vector& norm, float eps, int64_t rows,
                           float* out) {
    prepare_rows(rows, [&](int64_t row) {
        kernels_.rms_norm(in + row * cols, norm->data(), eps, cols, out + row * cols);
    });
}

void CpuBackend::quantize(const float* x, int64_t rows, int64_t cols, bool integers,
                          QuantizedRows& quantized) {
    quantized.shape(x, rows, cols, integers, by_bytes_);
    if (integers) prepare_rows(rows, [&](int64_t row) { quantized.quantize(kernels_, row); });
}

void CpuBackend::project(std::span<const Product> products, const QuantizedRows& x, int64_t rows,
                         const int32_t* row_index, float* out, int64_t out_stride) {
    int64_t panels = 0;
    int64_t bytes = 0;
    for (const Product& p : products) {
        panels += panels_in(p.weight->rows);
        bytes += p.weight->bytes() * rows;
    }
    const auto place = [&](int64_t panel) {
        for (const Product& p : products) {
            const int64_t count = panels_in(p.weight->rows);
            if (panel < count) return PanelPlace{p.weight, panel * kPanel};
            panel -= count;
        }
        return PanelPlace{};
    };
    spread(panels, kMaxPanels, bytes, [&](const Piece& piece) {
        int64_t skipped = 0;
        for (const Product& p : products) {
            const int64_t count = panels_in(p.weight->rows);
            const int64_t from = std::max(piece.begin - skipped, int64_t{0});
            const int64_t to = std::min(piece.end - skipped, count);
            for (int64_t panel = from; panel < to; panel += kMaxPanels) {
                const int64_t following = std::min(skipped + panel + kMaxPanels, skipped + to);
                multiply({.weight = p.weight,
                          .first_row = panel * kPanel,
                          .panels = std::min(kMaxPanels, to - panel),
                          .x = &x.view(),
                          .row_index = row_index,
                          .count = rows,
                          .out = out + p.offset + panel * kPanel,
                          .out_stride = out_stride,
                          .scratch = scratch(piece.thread, kernels_.matrix_scratch_floats(p.weight->cols)),
                          .after = place(following < piece.end ? following : piece.next)});
            }
            skipped += count;
        }
    });
}

void CpuBackend::norm_project(Activation in, const Vector& norm, float eps, std::span<const Product> products,
                              int64_t rows, float* out, int64_t out_stride) {
    const int64_t cols = width(in);
    normed_.ensure(static_cast<size_t>(rows * cols));
    normalize(data(in), cols, norm, eps, rows, normed_.data());
    quantize(normed_.data(), rows, cols, any_integers(products), rows_);
    project(products, rows_, rows, nullptr, out, out_stride);
}

void CpuBackend::apply(const Embed& op, const Batch& batch, int64_t rows) {
    const int64_t w = op.table.cols;
    float* out = data(op.out);
    prepare_rows(rows, [&](int64_t row) {
        kernels_.read_row(op.table, batch.tokens[static_cast<size_t>(row)], out + row * w);
    });
}

void CpuBackend::apply(const NormProject& op, const Batch&, int64_t rows) {
    std::vector<Product> products;
    int64_t offset = 0;
    for (const Matrix& w : op.weights) {
        products.push_back({&w, offset});
        offset += w.rows;
    }
    norm_project(op.in, op.norm, op.eps, products, rows, data(op.out), offset);
}

void CpuBackend::apply(const ProjectAdd& op, const Batch&, int64_t rows) {
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

void CpuBackend::apply(const NormGateUp& op, const Batch&, int64_t rows) {
    const int64_t w = op.gate.rows;
    const Product products[] = {{&op.gate, 0}, {&op.up, w}};
    product_.ensure(static_cast<size_t>(rows * 2 * w));
    norm_project(op.in, op.norm, op.eps, products, rows, product_.data(), 2 * w);
    prepare_rows(rows, [&](int64_t row) {
        const float* gate = product_.data() + row * 2 * w;
        kernels_.swiglu(gate, gate + w, w, data(op.out) + row * w);
    });
}

void CpuBackend::apply(const Head& op, const Batch& batch, int64_t rows) {
    const int64_t cols = width(op.in);
    float* hidden = data(op.hidden);
    normalize(data(op.in), cols, op.norm, op.eps, rows, hidden);
    if (batch.logit_rows.empty()) return;
    const Product product{&op.weight, 0};
    const std::span<const Product> products(&product, 1);
    const auto wanted = static_cast<int64_t>(batch.logit_rows.size());
    rows_.shape(hidden, rows, cols, any_integers(products), by_bytes_);
    if (any_integers(products)) {
        prepare_rows(wanted,
                     [&](int64_t i) { rows_.quantize(kernels_, batch.logit_rows[static_cast<size_t>(i)]); });
    }
    project(products, rows_, wanted, batch.logit_rows.data(), batch.logits, op.weight.rows);
}

void CpuBackend::apply(const CombineHidden& op, const Batch& batch, int64_t rows) {
    const int64_t h = width(op.embedding);
    normed_.ensure(static_cast<size_t>(rows * 2 * h));
    prepare_rows(rows, [&](int64_t row) {
        float* out = normed_.data() + row * 2 * h;
        kernels_.rms_norm(data(op.embedding) + row * h, op.embedding_norm->data(), op.eps, h, out);
        const float* hidden = data(op.hidden) + (batch.first_hidden + row) * h;
        kernels_.rms_norm(hidden, op.hidden_norm->data(), op.eps, h, out + h);
    });
    const Product product{&op.weight, 0};
    const std::span<const Product> products(&product, 1);
    quantize(normed_.data(), rows, 2 * h, any_integers(products), rows_);
    project(products, rows_, rows, nullptr, data(op.out), h);
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
    return std::make_unique<CpuBackend>(options);
}

}  // namespace lily::cpu
