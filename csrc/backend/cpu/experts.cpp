// The mixture of experts: routing, and the rows of each chosen expert computed together.
#include <cstring>

#include "backend/cpu/cpu_backend.h"

namespace lily::cpu {

void CpuBackend::apply(const Route& op, const Batch&, int64_t rows) {
    const int64_t cols = width(op.in);
    float* normed = data(op.normed);
    normalize(data(op.in), cols, op.norm, op.eps, rows, normed);
    std::vector<Product> products{{&op.router, 0}};
    for (const Matrix& gate : op.shared_gate) products.push_back({&gate, op.shape.experts});
    quantize(normed, rows, cols, any_integers(products), rows_);
    const int64_t stride = op.shape.experts + 1;
    product_.ensure(static_cast<size_t>(rows * stride));
    project(products, rows_, rows, nullptr, product_.data(), stride);
    prepare_rows(rows, [&](int64_t row) {
        route_row(op.shape, product_.data() + row * stride, data(op.routing) + row * width(op.routing));
    });
    groups_.build(op.shape, data(op.routing), width(op.routing), rows, switches_.expert_groups);
}

void CpuBackend::apply(const ExpertsUp& op, const Batch&, int64_t rows) {
    const ExpertShape& s = op.shape;
    const int64_t slot_width = std::max(s.width, s.shared_width);
    const Product sample[] = {{&op.gate[0], 0}, {&op.up[0], 0}};
    quantize(data(op.in), rows, width(op.in), any_integers(sample) || shared_by_integers(op.shared_gate),
             rows_);
    const auto& loads = groups_.loads();
    expert_items_.clear();
    int64_t most = 0;
    for (size_t i = 0; i < loads.size(); ++i) {
        const int64_t outputs = loads[i].expert < s.experts ? s.width : s.shared_width;
        for (int64_t row = 0; row < outputs; row += kWide) expert_items_.push_back({i, row});
        most = std::max(most, loads[i].count);
    }
    pair_rows_.resize(static_cast<size_t>(rows * s.slots()));
    const int32_t* base = loads.front().pairs;
    for (size_t i = 0; i < pair_rows_.size(); ++i) pair_rows_[i] = base[i] / static_cast<int32_t>(s.slots());
    // Gate (side 0) or up projection of an item.
    const auto weight = [&](const ExpertItem& item, int side) -> const Matrix& {
        const int64_t expert = loads[item.load].expert;
        if (expert == s.experts) return side == 0 ? op.shared_gate[0] : op.shared_up[0];
        return (side == 0 ? op.gate : op.up)[static_cast<size_t>(expert)];
    };
    const auto items = static_cast<int64_t>(expert_items_.size());
    const auto place = [&](int64_t index) {
        if (index == items) return PanelPlace{};
        const ExpertItem& item = expert_items_[static_cast<size_t>(index)];
        return PanelPlace{&weight(item, 0), item.first_row};
    };
    const int64_t bytes = 2 * (op.gate[0].bytes() * s.top_k + shared_bytes(op.shared_gate));
    spread(items, 1, rows * bytes, [&](const Piece& piece) {
        for (int64_t index = piece.begin; index < piece.end; ++index) {
            const ExpertItem& item = expert_items_[static_cast<size_t>(index)];
            const ExpertLoad& load = loads[item.load];
            const Matrix& gate = weight(item, 0);
            const Matrix& up = weight(item, 1);
            const int64_t room = kernels_.matrix_scratch_floats(gate.cols);
            float* space = scratch(piece.thread, room + 2 * most * kWide);
            float* results[2] = {space + room, space + room + most * kWide};
            const int64_t valid = std::min(kWide, gate.rows - item.first_row);
            for (int side = 0; side < 2; ++side) {
                multiply({.weight = side == 0 ? &gate : &up,
                          .first_row = item.first_row,
                          .panels = panels_in(valid),
                          .x = &rows_.view(),
                          .row_index = pair_rows_.data() + (load.pairs - base),
                          .count = load.count,
                          .out = results[side],
                          .out_stride = kWide,
                          .scratch = space,
                          .after = side == 0 ? PanelPlace{&up, item.first_row}
                                             : place(index + 1 < piece.end ? index + 1 : piece.next)});
            }
            for (int64_t i = 0; i < load.count; ++i) {
                kernels_.swiglu(results[0] + i * kWide, results[1] + i * kWide, valid,
                                data(op.out) + load.pairs[i] * slot_width + item.first_row);
            }
        }
    });
}

void CpuBackend::apply(const ExpertsDown& op, const Batch&, int64_t rows) {
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
    const int64_t strips = (hidden + kWide - 1) / kWide;
    const int64_t items = static_cast<int64_t>(loads.size()) * strips;
    const auto place = [&](int64_t item) {
        if (item == items) return PanelPlace{};
        const int64_t expert = loads[static_cast<size_t>(item / strips)].expert;
        const Matrix& down = expert == s.experts ? op.shared_down[0] : op.down[static_cast<size_t>(expert)];
        return PanelPlace{&down, item % strips * kWide};
    };
    const int64_t bytes = op.down[0].bytes() * s.top_k + shared_bytes(op.shared_down);
    spread(items, 4, rows * bytes, [&](const Piece& piece) {
        for (int64_t item = piece.begin; item < piece.end; ++item) {
            const ExpertLoad& load = loads[static_cast<size_t>(item / strips)];
            const auto [down, first] = place(item);
            const int64_t valid = std::min(kWide, hidden - first);
            const int64_t room = kernels_.matrix_scratch_floats(down->cols);
            float* space = scratch(piece.thread, room + load.count * kWide);
            float* result = space + room;
            multiply({.weight = down,
                      .first_row = first,
                      .panels = panels_in(valid),
                      .x = equal                      ? &rows_.view()
                           : load.expert == s.experts ? &shared_rows_.view()
                                                      : &routed_rows_.view(),
                      .row_index = load.pairs,
                      .count = load.count,
                      .out = result,
                      .out_stride = kWide,
                      .scratch = space,
                      .after = place(item + 1 < piece.end ? item + 1 : piece.next)});
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

void CpuBackend::quantize_uneven(const ExpertsDown& op, int64_t rows, bool integers) {
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

}  // namespace lily::cpu
