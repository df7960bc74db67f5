// What the Metal backend can do without (backend/ablation.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "backend/metal/choices.h"

namespace lily::metal {

struct Switches {
    bool row_parallel_products = true;  // several outputs per simdgroup; off: one_row_*
    bool fused_norms = true;            // norms in the products that read them; off: launches of their own
    bool fused_adds = true;             // products added to the residual stream in place; off: add_rows
    bool fused_gate_up = true;          // gate, up and SwiGLU in one launch; off: three
    bool fused_down = true;             // down, weights, shared expert, residual in one launch; off: four
    bool fused_rotary = true;           // norms, rotation and append in one launch; off: three
    bool fused_delta_norm = true;       // the recurrence's norm in it and the product; off: gated_norm
    bool gqa_packing = true;            // query heads share reads of the cache; off: attend_*_h1
    bool coalesced_cache_reads = true;  // lanes read neighbouring bytes; off: strided_attention
    bool long_context_blocks = true;    // splits grow with the context; off: one page each
    bool concurrent_pass = true;        // barriers where needed; off: before every launch
    bool token_handoff = true;          // the GPU picks tokens and goes on; off: the host does
    bool bf16_activations = true;       // between operations; off: fp32
    bool matrix_prefill = true;         // kernels of many rows; off: eight rows at a time
    bool compressed_weights = true;     // until they are multiplied; off: each matrix expanded before
    bool gpu_routing = true;            // of many rows; off: the host waits and routes
    bool fitted_tiles = true;           // of experts' real rows; off: 64 rows each
    bool chunked_prefill = true;        // blocks of block_rows(); off: all rows of a pass
    bool register_scan = true;          // the recurrence of a prompt row by row; off: by blocks of 16
    bool tensor_operations = true;      // many rows by tensor units where there are some
    bool tensor_fragments = true;       // tensor operations on registers; off: on tiles

    // InvalidArgument for a name that isn't one of these.
    explicit Switches(const std::set<std::string>& ablate);

    Outputs outputs() const { return {row_parallel_products}; }
    size_t activation_bytes() const { return bf16_activations ? 2 : 4; }
    int packed_heads(int64_t heads_per_kv) const { return gqa_packing && heads_per_kv > 1 ? 4 : 1; }
    uint32_t medium_from() const { return long_context_blocks ? kMediumFrom : kNever; }
    uint32_t long_from() const { return long_context_blocks ? kLongFrom : kNever; }
    // Splits of a row that attends to `length` positions.
    uint32_t splits(int64_t length) const;
};

}  // namespace lily::metal
