// Memory on the GPU that the operations of a pass share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/buffer_plan.h"
#include "backend/metal/choices.h"
#include "backend/metal/device.h"
#include "backend/metal/switches.h"

namespace lily::metal {

constexpr size_t kBinNumbers = 3 * (1024 + 64);  // by bin, by slice of the vocabulary

struct Sizes {  // in numbers of four bytes per row
    size_t squares = 0, router_logits = 0, best = 0, logits = 0, scratch = 0;
    size_t normed = 0, mixed = 0, gates = 0, picks = 0, entries = 0, products = 0;
    size_t experts = 0;                  // in all
    size_t partial = 0, statistics = 0;  // for each split
    size_t expanded = 0;                 // bytes in all
    void at_least(size_t Sizes::* what, int64_t count) {
        this->*what = std::max(this->*what, static_cast<size_t>(count));
    }
};

// What is kept in an activation of the graph.
struct ActivationUse {
    int64_t width = 0;  // 0: no operation writes it
    Needed needed = Needed::always;
    bool rounded = false;  // to the type of activations; else fp32
    bool normed = false;   // it is `Buffers::normed`
};

// By the graph's number.
std::vector<ActivationUse> activation_uses(const Plan& plan);

// Made after all steps are: until then `Sizes` are collected.
struct Buffers {
    // For a block of rows, in one buffer.
    std::vector<Placed> activations;  // by the graph's number
    Placed router_logits;             // [rows, experts + 1]
    Placed normed;                    // [rows, hidden]
    Placed inverses;                  // [rows]: of the lengths before a norm
    Placed mixed;                     // [rows, channels] after the convolution
    Placed gates;                     // [rows, 2 value heads + key heads]
    Placed picks, entries;            // [rows, top_k], [rows, slots]: routing.metal
    Placed counts;                    // [experts, rows / 32]
    Placed blocks;                    // [capacity] of four numbers
    Placed products;                  // of experts, [rows, slots, hidden]; before, of gate and up apart
    Placed row_partial;               // [cells, heads, head_dim] of attention in splits
    Placed row_statistics;            // [cells, heads, 2]
    uint32_t cells = 0;               // of RowSplits
    Placed expanded;                  // weights of one product, without `compressed_weights`
    DeviceBuffer last_hidden;         // [rows of a batch, hidden]: of the last one, for a draft head
    // For kMostRows rows.
    DeviceBuffer squares;     // [rows, heads, slices] of delta_rule's outputs
    DeviceBuffer scratch;     // what steps of several launches hand on: scratch_rows() in unfused.h
    DeviceBuffer partial;     // [rows, heads, splits, head_dim], grown with the context
    DeviceBuffer statistics;  // [rows, heads, splits]
    uint32_t splits = 0;      // room for
    DeviceBuffer best;        // [rows, threadgroups of the head] (order key, token)
    DeviceBuffer logits;      // [rows, vocabulary]
    DeviceBuffer bins;        // [rows, kBinNumbers] of sample.metal, left ready for the next step

    // Of a block of `rows` rows, for sequences of so many positions.
    BufferPlan plan_block(std::span<const ActivationUse> uses, const Sizes& sizes, const Switches& switches,
                          int64_t rows, int64_t positions);
    void allocate(Device& device, const BufferPlan& block, const Sizes& sizes);
    // Waits for nothing: what is under way keeps what it uses.
    void make_room_for_splits(Device& device, const Sizes& sizes, uint32_t wanted);

    // Bytes on the GPU of what is for kMostRows rows, apart from the partial results of so many splits.
    static uint64_t step_bytes(const Sizes& sizes);
    static uint64_t split_bytes(const Sizes& sizes, uint32_t splits);

  private:
    DeviceBuffer block_;
};

}  // namespace lily::metal
