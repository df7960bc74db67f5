#include "backend/metal/buffers.h"

#include <cstring>

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

}  // namespace

void Buffers::allocate(Device& device, const Plan& plan, const Sizes& sizes, const Switches& switches,
                       int64_t block_rows) {
    const size_t element = switches.activation_bytes();
    const auto rows = static_cast<size_t>(block_rows);
    const auto allocate = [&](size_t bytes, const char* label) {
        return device.allocate(std::max<size_t>(bytes, 4), label);
    };
    for (const int64_t width : plan.activation_widths) {
        activations.push_back(allocate(4 * rows * static_cast<size_t>(width), "activation"));
    }
    router_logits = allocate(4 * rows * sizes.router_logits, "router logits");
    normed = allocate(element * rows * sizes.normed, "normed rows");
    inverses = allocate(4 * rows, "inverse lengths");
    mixed = allocate(element * rows * sizes.mixed, "mixed rows");
    gates = allocate(4 * rows * sizes.gates, "gates");
    picks = allocate(4 * rows * sizes.picks, "chosen experts");
    entries = allocate(4 * rows * sizes.entries, "rows by expert");
    counts = allocate(4 * sizes.experts * divided(rows, 32), "rows of experts");
    blocks = allocate(16 * most_blocks(sizes, block_rows, switches.fitted_tiles), "blocks of experts");
    down = allocate(element * rows * sizes.down, "experts' results");
    expanded = allocate(sizes.expanded, "expanded weights");
    squares = allocate(4 * kMostRows * sizes.squares, "squares of heads");
    scratch = allocate(4 * kMostRows * sizes.scratch, "results between launches");
    best = allocate(4 * kMostRows * sizes.best, "best tokens");
    logits = allocate(4 * kMostRows * sizes.logits, "logits");
    bins = allocate(4 * kMostRows * kBinNumbers, "bins of choices");
    std::memset(bins.contents(), 0, bins.size());
}

void Buffers::make_room_for_splits(Device& device, const Sizes& sizes, uint32_t wanted) {
    if (wanted <= splits || sizes.partial == 0) return;
    const size_t cells = 4 * static_cast<size_t>(kMostRows) * wanted;
    partial = device.allocate(cells * sizes.partial, "partial results of attention");
    statistics = device.allocate(cells * sizes.statistics, "statistics of attention");
    splits = wanted;
}

}  // namespace lily::metal
