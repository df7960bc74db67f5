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
#include "backend/metal/matrix_path.h"
#include "backend/metal/weights.h"
#include "backend/ops.h"
#include "state/sequence.h"

namespace lily::metal {

// What operations share. Made after all steps are: until then `Sizes` are collected.
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
    // For kMostRows rows.
    DeviceBuffer squares;     // [rows, heads, slices] of delta_rule's outputs
    DeviceBuffer partial;     // [rows, heads, splits, head_dim], grown with the context
    DeviceBuffer statistics;  // [rows, heads, splits]
    uint32_t splits = 0;      // room for
    DeviceBuffer best;        // [rows, threadgroups of the head] (order key, token)
    DeviceBuffer logits;      // [rows, vocabulary]
    DeviceBuffer bins;        // [rows, kBinNumbers] of sample.metal, left ready for the next step
};

struct Sizes {  // in numbers of four bytes per row
    size_t squares = 0, router_logits = 0, best = 0, logits = 0;
    size_t normed = 0, mixed = 0, gates = 0, picks = 0, entries = 0, down = 0;
    size_t experts = 0;                  // in all
    size_t partial = 0, statistics = 0;  // for each split
    void at_least(size_t Sizes::* what, int64_t count) {
        this->*what = std::max(this->*what, static_cast<size_t>(count));
    }
};

// Rows of one sequence within a block.
struct Part {
    const DeviceBuffer* state;       // matrices: read
    const DeviceBuffer* next_state;  // matrices: written; may be the same
    const DeviceBuffer* history;     // convolution inputs: read and written
    uint32_t first_row, rows;
    uint32_t sequence;  // its row in the page table
};

// How a row's token is chosen by chance; as in metal/sample.metal.
struct SampleOptions {
    float temperature = 0.0f;
    uint32_t top_k = 0;
    float top_p = 1.0f, min_p = 0.0f;
    uint32_t seed_low = 0, seed_high = 0;
    uint32_t stream = 0, adjust = 0;
    float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
};
static_assert(sizeof(SampleOptions) == 44);

// Rows after which tokens are chosen; uint32 each, [rows].
struct Chosen {
    uint32_t rows;
    Range sources;    // in the block
    Range positions;  // move on by one
    Range tokens;     // out
    Range keys;       // out: order keys of the largest logits; not numbers if kNotANumber
    uint32_t vocabulary;
    std::optional<Range> options;  // SampleOptions [rows]; without them the largest logits are taken
};

constexpr uint32_t kNotANumber = 0xffffffff;
constexpr size_t kBinNumbers = 3 * (1024 + 64);  // by bin, by slice of the vocabulary

// Rows that go through the operations together.
struct Block {
    uint32_t rows = 0;
    // uint32 each, [rows]
    std::optional<Range> tokens, positions, sequences;
    std::optional<Range> pages;  // [sequences, table_stride]
    uint32_t table_stride = 0;
    const DeviceBuffer* cache = nullptr;
    std::vector<Part> parts;
    uint32_t splits = 0;       // most of any row
    uint32_t cache_pages = 0;  // the same
    // The head: rows whose logits are wanted, uint32 [wanted].
    uint32_t wanted = 0;
    std::optional<Range> sources;
    std::optional<Chosen> chosen;
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
    const MatrixPath& path;  // settled before the first pass
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

// "<what>_<type>_d<head size>", of a kernel on the cache. BackendError if there are none for this layout.
std::string cached_kernel(const char* what, const KvLayout& kv);

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
