// What the runtime asks of a backend. A backend knows operations, activations and sequences; it knows nothing
// of models.
//
// One thread at a time; the runtime holds the lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "backend/choice.h"
#include "backend/ops.h"
#include "state/sequence.h"

namespace lily {

// Keeps what advances the recurrent state of a sequence by rows that may yet be taken back.
class Tape {
  public:
    static constexpr int64_t kMostRows = 64;
    virtual ~Tape() = default;
};

// Rows [first_row, first_row + rows) of a batch belong to `sequence` and continue it.
struct Segment {
    Sequence* sequence;
    int64_t first_row;
    int64_t rows;
    // With a tape, of this backend, the recurrent state stays as it is; what would advance it is kept there.
    Tape* tape = nullptr;
};

// The token after a row, chosen by the backend.
struct ChosenRow {
    int32_t row;
    const Choice* choice;
    int32_t* token;  // out; may be kNoToken
};

struct Batch {
    std::vector<int32_t> tokens;  // one per row
    std::vector<Segment> segments;
    std::vector<int32_t> logit_rows;     // rows whose logits are wanted, ascending
    float* logits = nullptr;             // [logit_rows, vocabulary]
    std::vector<ChosenRow> chosen_rows;  // ascending; only with choices that the backend makes
    // Asked now and then when set; true gives the batch up.
    const std::function<bool()>* stop = nullptr;
    int64_t first_hidden = 0;  // of the hidden rows that the batch before left: the one beside row 0
};

struct BackendOptions {
    int threads = 0;  // 0: one per physical core
    std::set<std::string> ablate;
    uint64_t memory_limit = 0;  // bytes, of a backend with memory of its own; 0: what the system recommends
    int64_t context = 0;        // tokens that its memory must hold a conversation of; 0: any
};

// What a backend will be asked to run.
struct Plan {
    std::vector<std::span<const Op>> lists;      // as given to run(); they stay where they are
    std::vector<const StateLayout*> layouts;     // of the lists' sequences, as place() left them
    std::span<const int64_t> activation_widths;  // of the activations the ops refer to
    int64_t max_rows = 0;                        // of a batch
    int64_t positions = 0;                       // of a sequence
};

// Steps of a single row that follow one another without the host: each feeds the token that the one before
// chose. At most two are under way.
class Decoder {
  public:
    virtual ~Decoder() = default;
    // Begins a step; the sequence's cache has room for its row.
    virtual void start() = 0;
    // Waits for the oldest step; returns the token that it chose, or kNoToken: the next step is then without
    // meaning.
    virtual int32_t finish() = 0;
    // Waits for steps under way and takes them back: the sequence's states then cover what was finished. Last
    // call.
    virtual void take_back() = 0;
};

class Backend {
  public:
    virtual ~Backend() = default;
    // Settles where the states of sequences live and how they lie, for each layout; before prepare(). By
    // default on the heap, as the layout is.
    virtual void place(StateLayout&) {}
    // Once.
    virtual void prepare(const Plan& plan) = 0;
    // Runs the ops, a list of the plan or a part of one, over the batch; sequences have room for their rows.
    // The states then cover the batch. False if it was given up: the states are then a mixture.
    virtual bool run(std::span<const Op> ops, const Batch& batch) = 0;
    // An empty tape; null if this backend has no such thing.
    virtual std::unique_ptr<Tape> new_tape() const { return nullptr; }
    // Advances the recurrent state by the first `rows` rows of the last pass that had this tape.
    virtual void advance(std::span<const Op>, Sequence&, const Tape&, int64_t /*rows*/) {}
    // Whether it makes this choice itself.
    virtual bool chooses(const Choice&) const { return false; }
    // Steps from the sequence's end on, `token` first; null if this backend has no such thing. The sequence
    // is used by nobody else until take_back().
    virtual std::unique_ptr<Decoder> decoder(std::span<const Op>, Sequence&, int32_t /*token*/,
                                             const Choice&) {
        return nullptr;
    }
    // Rows of a prompt that are worth computing in one pass.
    virtual int64_t chunk() const { return 512; }
    virtual std::string describe() const = 0;
    // Bytes of its own memory after prepare(), by name: "limit" of all together, and what is taken whatever
    // is computed, "weights", "prompt buffers", "step buffers". Nothing if it has none.
    virtual std::map<std::string, uint64_t> memory() const { return {}; }
    // What it has done so far, by name: launches, barriers, ... Nothing by default.
    virtual std::map<std::string, uint64_t> counts() const { return {}; }
    // Rows of an activation after run(), as fp32 [rows, width].
    virtual std::vector<float> read_activation(Activation activation, int64_t first_row, int64_t rows) = 0;
};

}  // namespace lily
