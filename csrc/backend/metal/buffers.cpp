#include "backend/metal/buffers.h"

#include <array>
#include <cstring>
#include <variant>

#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

// Blocks of experts that the rows of any block may need.
size_t most_blocks(const Sizes& sizes, int64_t block_rows, bool fitted) {
    uint32_t most = 0;
    for (uint64_t rows = 1; sizes.experts > 0 && rows <= static_cast<uint64_t>(block_rows); ++rows) {
        // Simdgroup matrices have the smallest tiles, and may have to stand in for the others.
        const uint32_t tile =
            expert_tiling(MatrixPath::simdgroup, rows, sizes.experts, sizes.picks, fitted).rows;
        most = std::max(most,
                        block_capacity(rows, sizes.experts, sizes.picks, sizes.entries > sizes.picks, tile));
    }
    return most;
}

// What is for kMostRows rows.
struct StepBuffer {
    const char* name;
    DeviceBuffer Buffers::* buffer;
    size_t bytes;
};

std::array<StepBuffer, 5> step_buffers(const Sizes& sizes) {
    const auto bytes = [](size_t numbers) { return std::max<size_t>(4, 4 * kMostRows * numbers); };
    return {{{"squares of heads", &Buffers::squares, bytes(sizes.squares)},
             {"results between launches", &Buffers::scratch, bytes(sizes.scratch)},
             {"best tokens", &Buffers::best, bytes(sizes.best)},
             {"logits", &Buffers::logits, bytes(sizes.logits)},
             {"bins of choices", &Buffers::bins, bytes(kBinNumbers)}}};
}

}  // namespace

std::vector<ActivationUse> activation_uses(const Plan& plan) {
    std::vector<ActivationUse> uses(plan.activation_widths.size());
    const auto use = [&](Activation activation) -> ActivationUse& {
        const auto i = static_cast<size_t>(activation);
        uses[i].width = plan.activation_widths[i];
        return uses[i];
    };
    const auto rounded = [&](Activation activation, Needed needed) {
        use(activation).rounded = true;
        use(activation).needed = needed;
    };
    for (const std::span<const Op> ops : plan.lists) {
        for (const Op& op : ops) {
            if (const auto* o = std::get_if<Embed>(&op)) use(o->out).needed = Needed::always;
            if (const auto* o = std::get_if<NormProject>(&op)) rounded(o->out, Needed::in_mixer);
            if (const auto* o = std::get_if<DeltaRule>(&op)) rounded(o->out, Needed::in_mixer);
            if (const auto* o = std::get_if<Attend>(&op)) rounded(o->out, Needed::in_mixer);
            if (const auto* o = std::get_if<ExpertsUp>(&op)) rounded(o->out, Needed::in_mixture);
            if (const auto* o = std::get_if<NormGateUp>(&op)) rounded(o->out, Needed::in_mixture);
            if (const auto* o = std::get_if<Route>(&op)) {
                rounded(o->normed, Needed::always);
                use(o->normed).normed = true;
                use(o->routing).needed = Needed::in_mixture;
            }
            if (const auto* o = std::get_if<Head>(&op)) use(o->hidden).needed = Needed::at_end;
            if (const auto* o = std::get_if<CombineHidden>(&op)) use(o->out).needed = Needed::always;
        }
    }
    return uses;
}

BufferPlan Buffers::plan_block(std::span<const ActivationUse> uses, const Sizes& sizes,
                               const Switches& switches, int64_t block_rows, int64_t positions) {
    const size_t element = switches.activation_bytes();
    const auto rows = static_cast<size_t>(block_rows);
    size_t norms = sizes.normed;
    BufferPlan plan;
    activations.resize(uses.size());
    for (size_t i = 0; i < uses.size(); ++i) {
        const ActivationUse& use = uses[i];
        const auto width = static_cast<size_t>(use.width);
        if (use.normed) {
            norms = std::max(norms, width);
        } else {
            plan.add("activation " + std::to_string(i), use.needed,
                     (use.rounded ? element : 4) * rows * width, &activations[i]);
        }
    }
    plan.add("normed rows", Needed::always, element * rows * norms, &normed);
    for (size_t i = 0; i < uses.size(); ++i) {
        if (uses[i].normed) plan.add_same(&activations[i]);
    }
    plan.add("inverse lengths", Needed::always, 4 * rows, &inverses);
    plan.add("expanded weights", Needed::always, sizes.expanded, &expanded);
    const size_t delta_rule = (element * sizes.mixed + 4 * sizes.gates) * rows;
    plan.add("mixed rows", Needed::in_delta_rule, element * rows * sizes.mixed, &mixed);
    plan.add("gates", Needed::in_delta_rule, 4 * rows * sizes.gates, &gates);
    const size_t cell = 4 * (sizes.partial + sizes.statistics);
    cells = cell == 0
                ? 0
                : RowSplits::cells(static_cast<uint32_t>(block_rows),
                                   divided(static_cast<uint64_t>(positions), kPageTokens), delta_rule / cell);
    plan.add("attention in splits", Needed::in_attention, 4 * cells * sizes.partial, &row_partial);
    plan.add("statistics of splits", Needed::in_attention, 4 * cells * sizes.statistics, &row_statistics);
    plan.add("router logits", Needed::in_mixture, 4 * rows * sizes.router_logits, &router_logits);
    plan.add("chosen experts", Needed::in_mixture, 4 * rows * sizes.picks, &picks);
    plan.add("rows by expert", Needed::in_mixture, 4 * rows * sizes.entries, &entries);
    plan.add("rows of experts", Needed::in_mixture, 4 * sizes.experts * divided(rows, 32), &counts);
    plan.add("blocks of experts", Needed::in_mixture,
             16 * most_blocks(sizes, block_rows, switches.fitted_tiles), &blocks);
    plan.add("products of a mixture", Needed::in_mixture, element * rows * sizes.products, &products);
    return plan;
}

void Buffers::allocate(Device& device, const BufferPlan& block, const Sizes& sizes) {
    block_ = device.allocate(block.bytes(), "block of rows");
    block.place(block_);
    for (const StepBuffer& step : step_buffers(sizes))
        this->*step.buffer = device.allocate(step.bytes, step.name);
    std::memset(bins.contents(), 0, bins.size());
}

void Buffers::make_room_for_splits(Device& device, const Sizes& sizes, uint32_t wanted) {
    if (wanted <= splits || sizes.partial == 0) return;
    const size_t cells = 4 * static_cast<size_t>(kMostRows) * wanted;
    partial = DeviceBuffer();  // bytes of what goes count once
    statistics = DeviceBuffer();
    partial = device.allocate(cells * sizes.partial, "partial results of attention");
    statistics = device.allocate(cells * sizes.statistics, "statistics of attention");
    splits = wanted;
}

uint64_t Buffers::step_bytes(const Sizes& sizes) {
    uint64_t total = 0;
    for (const StepBuffer& step : step_buffers(sizes)) total += Device::whole_pages(step.bytes);
    return total;
}

uint64_t Buffers::split_bytes(const Sizes& sizes, uint32_t splits) {
    const uint64_t cells = uint64_t{4} * kMostRows * splits;
    return Device::whole_pages(cells * sizes.partial) + Device::whole_pages(cells * sizes.statistics);
}

}  // namespace lily::metal
