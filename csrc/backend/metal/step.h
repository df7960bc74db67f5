// An operation of the graph, ready to be launched: its weights, buffers and kernels are known.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/metal/choices.h"
#include "backend/metal/command.h"
#include "backend/metal/kernel_set.h"
#include "backend/metal/weights.h"
#include "backend/ops.h"
#include "state/sequence.h"

namespace lily::metal {

// What operations share, for kMostRows rows. Made after all steps are: until then `Sizes` are collected.
struct Buffers {
    std::vector<DeviceBuffer> activations;  // by the graph's number
    DeviceBuffer squares;                   // [rows, heads, slices] of delta_rule's outputs
    DeviceBuffer router_logits;             // [rows, experts + 1]
    DeviceBuffer partial;                   // [rows, heads, splits, head_dim], grown with the context
    DeviceBuffer statistics;                // [rows, heads, splits]
    uint32_t splits = 0;                    // room for
    DeviceBuffer best;                      // [rows, threadgroups of the head] (order key, token)
    DeviceBuffer logits;                    // [rows, vocabulary]
};

struct Sizes {  // in numbers of four bytes per row
    size_t squares = 0, router_logits = 0, best = 0, logits = 0;
    size_t partial = 0, statistics = 0;  // for each split
    void at_least(size_t Sizes::* what, int64_t count) {
        this->*what = std::max(this->*what, static_cast<size_t>(count));
    }
};

// Rows of one sequence within a block.
struct Part {
    const DeviceBuffer* state;       // read: matrices and convolution inputs
    const DeviceBuffer* next_state;  // written: matrices; may be the same
    uint32_t first_row, rows;
};

// Rows that go through the operations together.
struct Block {
    uint32_t rows = 0;
    // uint32 each, [rows]
    std::optional<Range> tokens, positions, sequences;
    std::optional<Range> pages;  // [sequences, table_stride]
    uint32_t table_stride = 0;
    const DeviceBuffer* cache = nullptr;
    std::vector<Part> parts;
    uint32_t splits = 0;  // most of any row
    // The head: rows whose logits or tokens are wanted, uint32 [wanted].
    uint32_t wanted = 0;
    std::optional<Range> sources;
    bool write_logits = false;
    // Where the chosen tokens of the wanted rows and their order keys go, uint32 [wanted]; positions move on
    // then. Without it nothing is chosen.
    std::optional<Range> choice, keys;
};

class Step {
  public:
    virtual ~Step() = default;
    virtual void encode(const Block& block, Pass& pass) const = 0;
};

// The second half of delta_rule's norm, for the projection that reads its output.
struct HeadNorm {
    uint32_t heads, head_shift, slices;
    float eps;
};

// What making steps needs.
struct Builder {
    KernelSet& kernels;
    Weights& weights;
    const Switches& switches;
    Buffers& buffers;
    Sizes& sizes;
    KvLayout kv;
    RecurrentLayout recurrent;
    int64_t positions;                          // most of a sequence
    std::map<Activation, HeadNorm> unfinished;  // activations that delta_rule wrote
    const Placed* coarse = nullptr;             // rotary tables, made once
    const Placed* fine = nullptr;
};

inline uint32_t divided(uint64_t count, uint64_t by) { return static_cast<uint32_t>((count + by - 1) / by); }

// Elements of `bytes` each, [first, first + count) of a buffer.
inline Range elements(const DeviceBuffer& buffer, size_t first, size_t count, size_t bytes = 4) {
    return {buffer, first * bytes, count * bytes};
}

std::unique_ptr<Step> make_step(const Embed& op, Builder& builder);
std::unique_ptr<Step> make_step(const NormProject& op, Builder& builder);
std::unique_ptr<Step> make_step(const DeltaRule& op, Builder& builder);
std::unique_ptr<Step> make_step(const RotaryAppend& op, Builder& builder);
std::unique_ptr<Step> make_step(const Attend& op, Builder& builder);
std::unique_ptr<Step> make_step(const ProjectAdd& op, Builder& builder);
std::unique_ptr<Step> make_step(const Route& op, Builder& builder);
std::unique_ptr<Step> make_step(const ExpertsUp& op, Builder& builder);
std::unique_ptr<Step> make_step(const ExpertsDown& op, Builder& builder);
std::unique_ptr<Step> make_step(const NormGateUp& op, Builder& builder);
std::unique_ptr<Step> make_step(const Head& op, Builder& builder);
std::unique_ptr<Step> make_step(const CombineHidden& op, Builder& builder);

}  // namespace lily::metal
