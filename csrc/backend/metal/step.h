// An operation of the graph, ready to be launched: its weights, buffers and kernels are known.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/metal/buffers.h"
#include "backend/metal/command.h"
#include "backend/metal/kernel_set.h"
#include "backend/metal/matrix_path.h"
#include "backend/metal/switches.h"
#include "backend/metal/weights.h"
#include "backend/ops.h"
#include "state/sequence.h"

namespace lily::metal {

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
    // Where some of the options have `adjust`: slots [rows], and by slot counts, bias and masks.
    struct Adjusted {
        Range slots, counts, bias, masks;
    };
    std::optional<Adjusted> adjusted;
};

constexpr uint32_t kNotANumber = 0xffffffff;
constexpr uint32_t kNoneAllowed = 0x007fffff;  // the key of minus infinity

// Rows that go through the operations together.
struct Block {
    uint32_t rows = 0;
    uint32_t first_row = 0;     // in the batch
    uint32_t first_hidden = 0;  // among the hidden rows of the batch before
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
    bool head_again = false;  // for other rows of the block
};

class Step {
  public:
    virtual ~Step() = default;
    virtual void encode(const Block& block, Pass& pass) const = 0;
    // Whether the host does a part of it, when the GPU is done with what was encoded.
    virtual bool has_host_part() const { return false; }
    virtual void run_host_part(const Block&) const {}
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
    const MatrixPath& path;        // settled before the first pass
    const bool& tensor_attention;  // the same
    Buffers& buffers;
    Sizes& sizes;
    KvLayout kv;
    RecurrentLayout recurrent;
    int64_t positions;                          // most of a sequence
    std::optional<Activation> hidden;           // that a draft head reads: of all rows of a batch
    std::map<Activation, HeadNorm> unfinished;  // activations that delta_rule wrote
    const Placed* coarse = nullptr;             // rotary tables, made once
    const Placed* fine = nullptr;
};

// Elements of `bytes` each, [first, first + count) of a buffer.
inline Range elements(const DeviceBuffer& buffer, size_t first, size_t count, size_t bytes = 4) {
    return {buffer, first * bytes, count * bytes};
}

inline Range elements(const Placed& place, size_t first, size_t count, size_t bytes = 4) {
    return {*place.buffer, place.offset + first * bytes, count * bytes};
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
