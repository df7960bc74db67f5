// Which kernel runs: every choice by rows, shape, format and context length. What can be switched off:
// switches.h.
//
// choice                   by                 kernels
// rows of a block          a sequence's rows  up to kMostRows those named here, beyond them those of rows.h;
//                          GPU, memory        at most block_rows of matrix_path.h, halved to kFewestBlockRows
// products of many rows    GPU, system        tensor fragments or tiles, simdgroup matrices: matrix_path.h
// rows of a launch         rows               _m1 _m2 _m4 _m8, the smallest that holds them
// rows of delta_rule       rows               _m1, else _m8
// weights                  stored format      _b<bits> affine, _b16 _f16 _f32, _mxfp4 _mxfp8 _nvfp4
// heads per cache read     heads per KV head  _h1 for one, else _h4
// pages per split          a row's length     1, from kMediumFrom 4, from kLongFrom 16; of many rows 256
// splits of many rows      tiles, memory      walked by a tile's threadgroup, or apart and joined: RowSplits
// output projection        its input          project_add_heads after delta_rule, else project_add
// shared expert            its format         the routed experts' launch if equal, else its own
// gate and up              their formats      one launch if equal, else the pieces of unfused.h
// choice of a token        what it asks for   argmax; sample_bins and sample; adjust_logits before them
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace lily::metal {

// Rounded up.
constexpr uint32_t divided(uint64_t count, uint64_t by) {
    return static_cast<uint32_t>((count + by - 1) / by);
}

constexpr int64_t kMostRows = 8;          // of a launch of the few-row kernels
constexpr int64_t kFewestBlockRows = 64;  // of a block of one sequence, where memory is short

// The room for rows of the kernel that takes `rows`.
constexpr int row_room(int64_t rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

// Of affine codes.
constexpr bool has_kernels(int bits, int group) {
    return bits >= 2 && bits <= 8 && bits != 7 && (group == 32 || group == 64 || group == 128);
}

// Threads of a product's threadgroup. Those that add to the residual stream have four simdgroups of four
// rows: 128 threadgroups at 2,048 outputs.
constexpr uint32_t kProjectThreads = 256;
constexpr uint32_t kAddThreads = 128;

// Outputs of a threadgroup, by kernel and rows: 16 R' of metal/common/few_rows.h for 256 threads. Without
// row-parallel products a simdgroup has one.
struct Outputs {
    bool row_parallel;

    uint32_t project(int64_t rows) const { return of(4, rows); }     // norm_project, head, project_float
    uint32_t gate_up(int64_t rows) const { return of(4, rows, 2); }  // norm_gate_up: two weight rows each
    uint32_t route(int64_t rows) const { return of(1, rows); }       // route
    uint32_t pieces() const { return of(2, 1); }                     // combine_hidden, experts_up, unfused
    uint32_t add() const { return row_parallel ? 16 : kAddThreads / 32; }  // project_add, experts_down

  private:
    // `wanted` is R at one row; there are at most 16 sums of a lane.
    uint32_t of(int wanted, int64_t rows, uint32_t weight_rows = 1) const {
        const int room = row_room(rows);
        const int r = wanted * room > 16 ? 16 / room : wanted;
        return row_parallel ? 16u * static_cast<uint32_t>(r) / weight_rows : kProjectThreads / 32;
    }
};

// Attention of many rows is split at multiples of so many pages: where tiles of a few rows would leave most
// of the GPU idle. The places are fixed, so that a row's bits don't depend on the rows beside it.
constexpr uint32_t kRowSplitPages = 256;
// So many rows have their splits apart at any length.
constexpr uint32_t kFewestSplitRows = 64;
// Tiles that leave no core of the largest GPU idle: 80 of them, each with the memory for two threadgroups.
constexpr uint32_t kFillingTiles = 160;

// How a block of many rows attends: in one launch, or apart and then joined. What is kept of a row has a cell
// of memory for each of the splits that run apart; one, for all, where they are walked.
struct RowSplits {
    uint32_t count;  // of the context
    uint32_t apart;  // threadgroups of a tile

    RowSplits(uint32_t rows, uint32_t tiles, uint32_t pages, uint32_t cells)
        : count(of(pages)), apart(tiles < kFillingTiles && uint64_t{rows} * count <= cells ? count : 1) {}
    // Of so many pages.
    static constexpr uint32_t of(uint64_t pages) { return divided(pages, kRowSplitPages); }
    // Cells for blocks of at most so many rows of sequences of so many pages: those for which there is memory
    // anyway, but at least those of one walk and of kFewestSplitRows apart.
    static constexpr uint32_t cells(uint32_t rows, uint64_t pages, uint64_t with_memory) {
        if (of(pages) <= 1) return 0;
        const uint32_t fewest = std::max(rows, kFewestSplitRows * of(pages));
        return std::max(fewest, static_cast<uint32_t>(with_memory));
    }
};

constexpr uint32_t kMediumFrom = 4096;
constexpr uint32_t kLongFrom = 32768;
constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

}  // namespace lily::metal
