// What the runtime asks of a backend. A backend knows operations, activations and sequences; it knows nothing
// of models.
//
// One thread at a time; the runtime holds the lock.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "backend/ops.h"
#include "state/sequence.h"

namespace lily {

// Rows [first_row, first_row + rows) of a batch belong to `sequence` and continue it.
struct Segment {
    Sequence* sequence;
    int64_t first_row;
    int64_t rows;
};

struct Batch {
    std::vector<int32_t> tokens;  // one per row
    std::vector<Segment> segments;
    std::vector<int32_t> logit_rows;  // rows whose logits are wanted, ascending
    float* logits = nullptr;          // [logit_rows, vocabulary]
    // Asked now and then when set; true gives the batch up.
    const std::function<bool()>* stop = nullptr;
};

struct BackendOptions {
    int threads = 0;  // 0: one per physical core
    std::set<std::string> ablate;
};

// What a backend will be asked to run.
struct Plan {
    std::vector<std::span<const Op>> lists;      // as given to run(); they stay where they are
    std::span<const int64_t> activation_widths;  // of the activations the ops refer to
    int64_t max_rows = 0;                        // of a batch
    int64_t positions = 0;                       // of a sequence
};

class Backend {
  public:
    virtual ~Backend() = default;
    // Settles where the states of its sequences live and how they lie; before prepare(). By default on the
    // heap, as the layout is.
    virtual void place(StateLayout&) {}
    // Once.
    virtual void prepare(const Plan& plan) = 0;
    // Runs the ops over the batch; sequences have room for their rows. The states then cover the batch. False
    // if it was given up: the states are then a mixture.
    virtual bool run(std::span<const Op> ops, const Batch& batch) = 0;
    virtual std::string describe() const = 0;
    // Rows of an activation after run(), as fp32 [rows, width].
    virtual std::vector<float> read_activation(Activation activation, int64_t first_row, int64_t rows) = 0;
};

}  // namespace lily
