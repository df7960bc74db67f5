#include "backend/ops.h"

#include <algorithm>

namespace lily {
namespace {

template <typename... F>
struct Overload : F... {
    using F::operator()...;
};
template <typename... F>
Overload(F...) -> Overload<F...>;

}  // namespace

std::string_view op_name(const Op& op) {
    static constexpr std::string_view kNames[] = {
        "embed", "norm_project", "delta_rule",   "rotary_append", "attend", "project_add",
        "route", "experts_up",   "experts_down", "norm_gate_up",  "head",   "combine_hidden",
    };
    static_assert(std::size(kNames) == std::variant_size_v<Op>);
    return kNames[op.index()];
}

std::vector<const Matrix*> matrices(const Op& op) {
    std::vector<const Matrix*> result;
    const auto one = [&](const Matrix& matrix) { result.push_back(&matrix); };
    const auto all = [&](const std::vector<Matrix>& many) {
        for (const Matrix& matrix : many) one(matrix);
    };
    std::visit(Overload{
                   [&](const Embed& o) { one(o.table); },
                   [&](const NormProject& o) { all(o.weights); },
                   [](const DeltaRule&) {},
                   [](const RotaryAppend&) {},
                   [](const Attend&) {},
                   [&](const ProjectAdd& o) { one(o.weight); },
                   [&](const Route& o) {
                       one(o.router);
                       all(o.shared_gate);
                   },
                   [&](const ExpertsUp& o) {
                       for (const auto* part : {&o.gate, &o.up, &o.shared_gate, &o.shared_up}) all(*part);
                   },
                   [&](const ExpertsDown& o) {
                       all(o.down);
                       all(o.shared_down);
                   },
                   [&](const NormGateUp& o) {
                       one(o.gate);
                       one(o.up);
                   },
                   [&](const Head& o) { one(o.weight); },
                   [&](const CombineHidden& o) { one(o.weight); },
               },
               op);
    return result;
}

std::pair<Activation, int64_t> result(const Op& op) {
    using Result = std::pair<Activation, int64_t>;
    return std::visit(Overload{
                          [](const Embed& o) { return Result{o.out, o.table.cols}; },
                          [](const NormProject& o) {
                              int64_t rows = 0;
                              for (const Matrix& matrix : o.weights) rows += matrix.rows;
                              return Result{o.out, rows};
                          },
                          [](const DeltaRule&) { return Result{-1, 0}; },
                          [](const RotaryAppend&) { return Result{-1, 0}; },
                          [](const Attend& o) { return Result{o.out, o.shape.queries()}; },
                          [](const ProjectAdd& o) { return Result{o.residual, o.weight.rows}; },
                          [](const Route& o) { return Result{o.normed, o.router.cols}; },
                          [](const ExpertsUp& o) {
                              return Result{o.out,
                                            o.shape.slots() * std::max(o.shape.width, o.shape.shared_width)};
                          },
                          [](const ExpertsDown& o) { return Result{o.residual, o.down[0].rows}; },
                          [](const NormGateUp& o) { return Result{o.out, o.gate.rows}; },
                          [](const Head& o) { return Result{o.hidden, o.weight.cols}; },
                          [](const CombineHidden& o) { return Result{o.out, o.weight.rows}; },
                      },
                      op);
}

}  // namespace lily
