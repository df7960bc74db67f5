// Which kernel runs: every choice by rows, shape, format and context length, and what can be switched off.
//
// choice                   by                 kernels
// rows of a block          a sequence's rows  up to kMostRows those named here, beyond them those of rows.h
// products of many rows    GPU, system        tensor fragments, tensor tiles, simdgroup matrices:
// matrix_path.h rows of a launch         rows               _m1 _m2 _m4 _m8, the smallest that holds them
// rows of delta_rule       rows               _m1, else _m8
// weights                  stored format      _b<bits> affine, _b16 _f16 _f32, _mxfp4 _mxfp8 _nvfp4
// heads per cache read     heads per KV head  _h1 for one, else _h4
// pages per split          a row's length     1, from kMediumFrom 4, from kLongFrom 16
// output projection        its input          project_add_heads after delta_rule, else project_add
// shared expert            its format         the routed experts' launch if equal, else its own
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "base/error.h"

namespace lily::metal {

constexpr int64_t kMostRows = 8;      // of a launch of the few-row kernels
constexpr int64_t kBlockRows = 2048;  // of a block of one sequence through the kernels of many rows

// The room for rows of the kernel that takes `rows`.
constexpr int row_room(int64_t rows) { return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

// Of affine codes.
constexpr bool has_kernels(int bits, int group) {
    return bits >= 2 && bits <= 8 && bits != 7 && (group == 32 || group == 64 || group == 128);
}

// Weight rows of a threadgroup of 256 threads, by the room for rows: 16 R' in metal/common/few_rows.h.
constexpr uint32_t weight_rows(int wanted, int room) {
    return 16u * static_cast<uint32_t>(wanted * room > 16 ? 16 / room : wanted);
}
constexpr int kProjectWanted = 4;  // norm_project, head
constexpr int kGateUpWanted = 4;   // norm_gate_up: twice the rows of an output, so half as many outputs
constexpr int kRouteWanted = 1;
constexpr uint32_t kProjectThreads = 256;
// project_add and experts_down: four simdgroups of four rows, 128 threadgroups at 2,048 outputs.
constexpr uint32_t kAddThreads = 128;
constexpr uint32_t kAddRows = 16;
constexpr uint32_t kExpertColumns = 32;  // of experts_up, per threadgroup of 256 threads

constexpr uint32_t kMediumFrom = 4096;
constexpr uint32_t kLongFrom = 32768;
constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

// What can be switched off alone.
struct Switches {
    bool gqa_packing = true;          // query heads share reads of the cache; off: attend_*_h1
    bool long_context_blocks = true;  // splits grow with the context; off: one page each
    bool concurrent_pass = true;      // barriers where needed; off: before every launch
    bool token_handoff = true;        // the GPU picks greedy tokens and goes on; off: the host does
    bool bf16_activations = true;     // between operations; off: fp32
    bool matrix_prefill = true;       // kernels of many rows; off: eight rows at a time
    bool tensor_operations = true;    // many rows by tensor units where there are some
    bool tensor_fragments = true;     // tensor operations on registers; off: on tiles
    bool register_scan = true;        // the recurrence of a prompt row by row; off: by blocks of 16

    explicit Switches(const std::set<std::string>& ablate) {
        for (const std::string& name : ablate) {
            bool* value = name == "gqa_packing"           ? &gqa_packing
                          : name == "long_context_blocks" ? &long_context_blocks
                          : name == "concurrent_pass"     ? &concurrent_pass
                          : name == "token_handoff"       ? &token_handoff
                          : name == "bf16_activations"    ? &bf16_activations
                          : name == "matrix_prefill"      ? &matrix_prefill
                          : name == "register_scan"       ? &register_scan
                          : name == "tensor_operations"   ? &tensor_operations
                          : name == "tensor_fragments"    ? &tensor_fragments
                                                          : nullptr;
            if (!value) {
                throw InvalidArgument(
                    "ablate: the Metal backend has nothing named '" + name +
                    "' to switch off; it has gqa_packing, long_context_blocks, "
                    "concurrent_pass, token_handoff, bf16_activations, matrix_prefill, register_scan, "
                    "tensor_operations and tensor_fragments");
            }
            *value = false;
        }
    }

    size_t activation_bytes() const { return bf16_activations ? 2 : 4; }
    int packed_heads(int64_t heads_per_kv) const { return gqa_packing && heads_per_kv > 1 ? 4 : 1; }
    uint32_t medium_from() const { return long_context_blocks ? kMediumFrom : kNever; }
    uint32_t long_from() const { return long_context_blocks ? kLongFrom : kNever; }
    // Splits of a row that attends to `length` positions.
    uint32_t splits(int64_t length) const {
        const int64_t pages = length < medium_from() ? 1 : length < long_from() ? 4 : 16;
        return static_cast<uint32_t>((length + 64 * pages - 1) / (64 * pages));
    }
};

}  // namespace lily::metal
