#include "backend/metal/metal_backend.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "backend/metal/state.h"
#include "backend/metal/step.h"
#include "base/error.h"
#include "base/numeric.h"

namespace lily::metal {
namespace {

using Program = std::vector<std::unique_ptr<Step>>;

StreamOptions stream_options(const Switches& switches) {
    StreamOptions options = StreamOptions::from_environment();
    options.serial = options.serial || !switches.concurrent_pass;
    return options;
}

// What changes from pass to pass, written by the host: uint32 each.
struct Inputs {
    DeviceBuffer tokens, positions, sequences, sources;  // by row of the batch
    DeviceBuffer pages;                                  // [sequences, table_stride]

    Inputs(Device& device, int64_t rows)
        : tokens(device.allocate(4 * static_cast<size_t>(rows), "tokens")),
          positions(device.allocate(4 * static_cast<size_t>(rows), "positions")),
          sequences(device.allocate(4 * static_cast<size_t>(rows), "sequences")),
          sources(device.allocate(4 * static_cast<size_t>(rows), "rows of logits")) {}
};

class MetalBackend final : public Backend {
  public:
    explicit MetalBackend(const BackendOptions& options)
        : switches_(options.ablate), device_(std::make_shared<Device>()) {}

    ~MetalBackend() override {
        if (stream_) stream_->wait_idle();
    }

    void place(StateLayout& layout) override {
        states_ = std::make_shared<DeviceStates>(device_, static_cast<size_t>(layout.kv.page_bytes()));
        layout.kv.memory = states_;
        layout.recurrent.memory = states_;
        layout.recurrent.keys_last = true;
        layout.recurrent.ring = kHistory;
        layout.recurrent.bf16_inputs = switches_.bf16_activations;
        layout_ = layout;
    }

    void prepare(const Plan& plan) override {
        kernels_ = std::make_unique<KernelSet>(*device_, switches_.bf16_activations ? "bfloat" : "float");
        for (const std::span<const Op> ops : plan.lists) {
            for (const Op& op : ops) {
                for (const Matrix* matrix : matrices(op)) kernels_->of(number_format(*matrix));
            }
        }
        stream_ = std::make_unique<CommandStream>(*device_, stream_options(switches_));
        weights_ = std::make_unique<Weights>();
        Sizes sizes;
        Builder builder{*kernels_,         *weights_,      switches_, buffers_, sizes,  layout_.kv,
                        layout_.recurrent, plan.positions, {},        nullptr,  nullptr};
        for (const std::span<const Op> ops : plan.lists) {
            Program program;
            for (const Op& op : ops) {
                program.push_back(std::visit([&](const auto& o) { return make_step(o, builder); }, op));
            }
            programs_.emplace_back(ops.data(), std::move(program));
        }
        weights_->load(*device_);
        kernels_->require_all();
        widths_.assign(plan.activation_widths.begin(), plan.activation_widths.end());
        const auto allocate = [&](size_t numbers, const char* label) {
            return device_->allocate(4 * kMostRows * std::max<size_t>(numbers, 1), label);
        };
        for (const int64_t width : plan.activation_widths) {
            buffers_.activations.push_back(allocate(static_cast<size_t>(width), "activation"));
        }
        buffers_.squares = allocate(sizes.squares, "squares of heads");
        buffers_.router_logits = allocate(sizes.router_logits, "router logits");
        buffers_.best = allocate(sizes.best, "best tokens");
        buffers_.logits = allocate(sizes.logits, "logits");
        sizes_ = sizes;
        make_room_for_splits(switches_.splits(kMediumFrom - 1));
        inputs_ = std::make_unique<Inputs>(*device_, plan.max_rows);
        max_rows_ = plan.max_rows;
    }

    bool run(std::span<const Op> ops, const Batch& batch) override {
        const auto rows = static_cast<int64_t>(batch.tokens.size());
        if (rows > max_rows_) throw BackendError("a batch of " + std::to_string(rows) + " rows is too large");
        const Program& program = find(ops);
        const uint32_t stride = write_inputs(batch);
        Completion last;
        for (int64_t first = 0; first < rows; first += kMostRows) {
            if (first > 0 && batch.stop && (*batch.stop)()) {
                last.wait();
                return false;
            }
            Block block = make_block(batch, first, stride);
            last = commit(program, block);
            if (block.wanted > 0) {
                last.wait();
                copy_logits(batch, first, block.wanted);
            }
        }
        last.wait();
        return true;
    }

    std::string describe() const override {
        char size[32];
        std::snprintf(size, sizeof(size), "%.1f", static_cast<double>(weights_->bytes()) / (1 << 20));
        return "metal (" + device_->name() + ", " + size + " MiB of weights read into its memory)";
    }

    std::vector<float> read_activation(Activation activation, int64_t first, int64_t rows) override {
        const auto width = static_cast<size_t>(widths_[static_cast<size_t>(activation)]);
        if (first < 0 || first + rows > kMostRows) {
            throw InvalidArgument("only rows of the last " + std::to_string(kMostRows) + " can be read");
        }
        const auto* from = buffers_.activations[static_cast<size_t>(activation)].as<const float>();
        return {from + static_cast<size_t>(first) * width, from + static_cast<size_t>(first + rows) * width};
    }

  private:
    const Program& find(std::span<const Op> ops) const {
        for (const auto& [list, program] : programs_) {
            if (list == ops.data()) return program;
        }
        throw BackendError("the backend wasn't prepared for these operations");
    }

    void make_room_for_splits(uint32_t splits) {
        if (splits <= buffers_.splits || sizes_.partial == 0) return;
        const size_t cells = 4 * static_cast<size_t>(kMostRows) * splits;
        buffers_.partial = device_->allocate(cells * sizes_.partial, "partial results of attention");
        buffers_.statistics = device_->allocate(cells * sizes_.statistics, "statistics of attention");
        buffers_.splits = splits;
    }

    // Tokens, positions, sequences, rows of logits and pages of a batch; returns the pages per table.
    uint32_t write_inputs(const Batch& batch) {
        std::copy(batch.tokens.begin(), batch.tokens.end(), inputs_->tokens.as<int32_t>());
        int64_t most = 1;
        for (const Segment& s : batch.segments) {
            most = std::max(most, (s.sequence->length() + s.rows + kPageTokens - 1) / kPageTokens);
        }
        const size_t cells = batch.segments.size() * static_cast<size_t>(most);
        if (4 * cells > inputs_->pages.size()) inputs_->pages = device_->allocate(8 * cells, "page table");
        auto* positions = inputs_->positions.as<uint32_t>();
        auto* sequences = inputs_->sequences.as<uint32_t>();
        auto* pages = inputs_->pages.as<uint32_t>();
        for (size_t i = 0; i < batch.segments.size(); ++i) {
            const Segment& s = batch.segments[i];
            for (int64_t row = 0; row < s.rows; ++row) {
                positions[s.first_row + row] = static_cast<uint32_t>(s.sequence->length() + row);
                sequences[s.first_row + row] = static_cast<uint32_t>(i);
            }
            const KvCache& kv = s.sequence->kv();
            for (int64_t page = 0; page * kPageTokens < s.sequence->length() + s.rows; ++page) {
                pages[i * static_cast<size_t>(most) + static_cast<size_t>(page)] =
                    DeviceStates::page_number(kv.block(page));
            }
        }
        auto* sources = inputs_->sources.as<uint32_t>();
        int64_t block = -1;
        int64_t at = 0;
        for (const int32_t row : batch.logit_rows) {
            if (row / kMostRows != block) {
                block = row / kMostRows;
                at = block * kMostRows;
            }
            sources[at++] = static_cast<uint32_t>(row % kMostRows);
        }
        return static_cast<uint32_t>(most);
    }

    Block make_block(const Batch& batch, int64_t first, uint32_t stride) {
        const int64_t end = std::min(first + kMostRows, static_cast<int64_t>(batch.tokens.size()));
        const auto begin = static_cast<size_t>(first);
        Block block;
        block.rows = static_cast<uint32_t>(end - first);
        block.tokens = elements(inputs_->tokens, begin, block.rows);
        block.positions = elements(inputs_->positions, begin, block.rows);
        block.sequences = elements(inputs_->sequences, begin, block.rows);
        block.pages = elements(inputs_->pages, 0, batch.segments.size() * stride);
        block.table_stride = stride;
        for (const Segment& s : batch.segments) {
            const int64_t from = std::max(s.first_row, first);
            const int64_t to = std::min(s.first_row + s.rows, end);
            if (from >= to) continue;
            const DeviceBuffer* state = &DeviceStates::recurrent(s.sequence->recurrent().block());
            block.parts.push_back(
                {state, state, static_cast<uint32_t>(from - first), static_cast<uint32_t>(to - from)});
            for (int64_t row = from; row < to; ++row) {
                const int64_t length = s.sequence->length() + row - s.first_row + 1;
                block.splits = std::max(block.splits, switches_.splits(length));
            }
        }
        block.wanted =
            static_cast<uint32_t>(std::count_if(batch.logit_rows.begin(), batch.logit_rows.end(),
                                                [&](int32_t row) { return row >= first && row < end; }));
        block.sources = elements(inputs_->sources, begin, block.wanted);
        block.write_logits = true;
        return block;
    }

    Completion commit(const Program& program, Block& block) {
        make_room_for_splits(block.splits);
        const DeviceStates::Held held = states_->hold();
        block.cache = held.pages;
        Pass pass = stream_->begin("step");
        for (const std::unique_ptr<Step>& step : program) step->encode(block, pass);
        return pass.commit();
    }

    void copy_logits(const Batch& batch, int64_t first, uint32_t wanted) const {
        const auto done = static_cast<size_t>(std::count_if(batch.logit_rows.begin(), batch.logit_rows.end(),
                                                            [&](int32_t row) { return row < first; }));
        std::memcpy(batch.logits + done * sizes_.logits, buffers_.logits.contents(),
                    size_t{wanted} * sizes_.logits * sizeof(float));
    }

    Switches switches_;
    std::shared_ptr<Device> device_;
    std::shared_ptr<DeviceStates> states_;
    StateLayout layout_;
    std::unique_ptr<KernelSet> kernels_;
    std::unique_ptr<Weights> weights_;
    Buffers buffers_;
    Sizes sizes_;
    std::vector<std::pair<const Op*, Program>> programs_;
    std::vector<int64_t> widths_;
    std::unique_ptr<Inputs> inputs_;
    int64_t max_rows_ = 0;
    std::unique_ptr<CommandStream> stream_;  // waits for the GPU before anything above goes away
};

}  // namespace

std::unique_ptr<Backend> make_metal_backend(const BackendOptions& options) {
    return std::make_unique<MetalBackend>(options);
}

}  // namespace lily::metal
