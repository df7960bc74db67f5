// Memory on the GPU that the operations of a pass share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/choices.h"
#include "backend/metal/device.h"
#include "backend/metal/switches.h"

namespace lily::metal {

constexpr size_t kBinNumbers = 3 * (1024 + 64);  // by bin, by slice of the vocabulary

inline uint32_t divided(uint64_t count, uint64_t by) { return static_cast<uint32_t>((count + by - 1) / by); }

struct Sizes {  // in numbers of four bytes per row
    size_t squares = 0, router_logits = 0, best = 0, logits = 0, scratch = 0;
    size_t normed = 0, mixed = 0, gates = 0, picks = 0, entries = 0, down = 0;
    size_t experts = 0;                  // in all
    size_t partial = 0, statistics = 0;  // for each split
    size_t expanded = 0;                 // bytes in all
    void at_least(size_t Sizes::* what, int64_t count) {
        this->*what = std::max(this->*what, static_cast<size_t>(count));
    }
};

// Made after all steps are: until then `Sizes` are collected.
struct Buffers {
    // For kBlockRows rows.
    std::vector<DeviceBuffer> activations;  // by the graph's number
    DeviceBuffer router_logits;             // [rows, experts + 1]
    DeviceBuffer normed;                    // [rows, hidden]
    DeviceBuffer inverses;                  // [rows]: of the lengths before a norm
    DeviceBuffer mixed;                     // [rows, channels] after the convolution
    DeviceBuffer gates;                     // [rows, 2 value heads + key heads]
    DeviceBuffer picks, entries;            // [rows, top_k], [rows, slots]: routing.metal
    DeviceBuffer counts;                    // [experts, rows / 32]
    DeviceBuffer blocks;                    // [capacity] of four numbers
    DeviceBuffer down;                      // [rows, slots, hidden]
    DeviceBuffer last_hidden;               // [rows of a batch, hidden]: of the last one, for a draft head
    DeviceBuffer expanded;                  // weights of one product, without `compressed_weights`
    // For kMostRows rows.
    DeviceBuffer squares;     // [rows, heads, slices] of delta_rule's outputs
    DeviceBuffer scratch;     // what steps of several launches hand on: scratch_rows() in unfused.h
    DeviceBuffer partial;     // [rows, heads, splits, head_dim], grown with the context
    DeviceBuffer statistics;  // [rows, heads, splits]
    uint32_t splits = 0;      // room for
    DeviceBuffer best;        // [rows, threadgroups of the head] (order key, token)
    DeviceBuffer logits;      // [rows, vocabulary]
    DeviceBuffer bins;        // [rows, kBinNumbers] of sample.metal, left ready for the next step

    void allocate(Device& device, const Plan& plan, const Sizes& sizes, const Switches& switches,
                  int64_t block_rows);
    // Waits for nothing: what is under way keeps what it uses.
    void make_room_for_splits(Device& device, const Sizes& sizes, uint32_t wanted);
};

}  // namespace lily::metal
