#include "backend/metal/metal_backend.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "backend/metal/choosing.h"
#include "backend/metal/cuts.h"
#include "backend/metal/decoder_steps.h"
#include "backend/metal/memory_needs.h"
#include "backend/metal/program.h"
#include "backend/metal/rows.h"
#include "backend/metal/state.h"
#include "base/error.h"
#include "base/numeric.h"

namespace lily::metal {
namespace {

constexpr int64_t kMostSampled = 1 << 18;  // tokens that sample.metal chooses from

StreamOptions stream_options(const Switches& switches) {
    StreamOptions options = StreamOptions::from_environment();
    options.serial = options.serial || !switches.concurrent_pass;
    return options;
}

// What changes from pass to pass, written by the host: uint32 each.
struct Inputs {
    // With the page tables of a sequence of so many positions, and the small buffers of a step ahead.
    static uint64_t bytes(int64_t rows, int64_t positions) {
        const auto count = static_cast<uint64_t>(rows);
        const uint64_t pages = divided(static_cast<uint64_t>(positions), kPageTokens);
        return 9 * Device::whole_pages(4 * count) + Device::whole_pages(sizeof(SampleOptions) * count) +
               2 * Device::whole_pages(8 * std::max<uint64_t>(pages, 64)) + 2 * Device::whole_pages(1);
    }

    DeviceBuffer tokens, positions, sequences, sources;                  // by row of the batch
    DeviceBuffer chosen_sources, chosen_positions, chosen_tokens, keys;  // the same, of rows with a choice
    DeviceBuffer slots;                                                  // of Adjustments, the same
    DeviceBuffer options;                                                // SampleOptions, the same
    DeviceBuffer pages;                                                  // [sequences, table_stride]

    Inputs(Device& device, int64_t rows) {
        const size_t bytes = 4 * static_cast<size_t>(rows);
        tokens = device.allocate(bytes, "tokens");
        positions = device.allocate(bytes, "positions");
        sequences = device.allocate(bytes, "sequences");
        sources = device.allocate(bytes, "rows of logits");
        chosen_sources = device.allocate(bytes, "rows of choices");
        chosen_positions = device.allocate(bytes, "positions of choices");
        chosen_tokens = device.allocate(bytes, "chosen tokens");
        keys = device.allocate(bytes, "order keys of choices");
        slots = device.allocate(bytes, "slots of choices");
        options = device.allocate(sizeof(SampleOptions) * static_cast<size_t>(rows), "options of choices");
    }
};

class MetalBackend final : public Backend {
  public:
    explicit MetalBackend(const BackendOptions& options)
        : switches_(options.ablate),
          device_(std::make_shared<Device>(options.memory_limit)),
          context_(options.context),
          path_(best_path(*device_, switches_)) {}

    ~MetalBackend() override {
        for (const auto& pool : pools_) pool->before_growing({});
        if (stream_) stream_->wait_idle();
    }

    void place(StateLayout& layout) override {
        pools_.push_back(
            std::make_shared<DeviceStates>(device_, static_cast<size_t>(layout.kv.page_bytes())));
        layout.kv.memory = pools_.back();
        layout.recurrent.memory = pools_.back();
        layout.recurrent.keys_last = true;
        layout.recurrent.ring = kHistory;
        layout.recurrent.bf16_inputs = switches_.bf16_activations;
    }

    void prepare(const Plan& plan) override {
        kernels_ = std::make_unique<KernelSet>(*device_, switches_, path_);
        for (const std::span<const Op> ops : plan.lists) {
            for (const Op& op : ops) {
                for (const Matrix* matrix : matrices(op)) kernels_->of(number_format(*matrix));
            }
        }
        stream_ = std::make_unique<CommandStream>(*device_, stream_options(switches_));
        for (const auto& pool : pools_) pool->before_growing([this] { stream_->wait_idle(); });
        weights_ = std::make_unique<Weights>();
        Sizes sizes;
        uses_ = activation_uses(plan);
        Builder builder{*kernels_,    *weights_, switches_, path_,  tensor_attention_,
                        buffers_,     sizes,     {},        {},     plan.positions,
                        std::nullopt, {},        nullptr,   nullptr};
        for (const std::span<const Op> ops : plan.lists) {
            for (const Op& op : ops) {
                if (const auto* combine = std::get_if<CombineHidden>(&op)) builder.hidden = combine->hidden;
            }
        }
        for (size_t i = 0; i < plan.lists.size(); ++i) {
            const StateLayout& layout = *plan.layouts[i];
            builder.kv = layout.kv;
            builder.recurrent = layout.recurrent;
            programs_.push_back(std::make_unique<Program>(
                plan.lists[i], static_cast<DeviceStates&>(*layout.kv.memory), builder));
        }
        hidden_ = builder.hidden;
        const uint64_t hidden = hidden_bytes(plan.max_rows);
        needs_ = MemoryNeeds{device_->budget(),
                             device_->largest_buffer(),
                             weights_->lay_out(*device_),
                             Buffers::step_bytes(sizes) + Inputs::bytes(plan.max_rows, plan.positions) +
                                 Device::whole_pages(hidden),
                             0,
                             sizes,
                             switches_,
                             plan.layouts,
                             plan.positions};
        const BufferPlan block = plan_block(std::min(plan.max_rows, plan.positions));
        needs_->require(std::max<int64_t>(1, context_));
        weights_->load(*device_);
        kernels_->require_all();
        buffers_.allocate(*device_, block, sizes);
        if (hidden > 0) buffers_.last_hidden = device_->allocate(hidden, "hidden rows");
        try_path(plan);
        buffers_.make_room_for_splits(*device_, sizes, switches_.splits(kMediumFrom - 1));
        vocabulary_ = sizes.logits;
        passes_ = std::make_unique<Passes>(*device_, *stream_, buffers_, sizes);
        inputs_ = std::make_unique<Inputs>(*device_, plan.max_rows);
        max_rows_ = plan.max_rows;
    }

    bool run(std::span<const Op> ops, const Batch& batch) override {
        const auto rows = static_cast<int64_t>(batch.tokens.size());
        if (rows > max_rows_) throw BackendError("a batch of " + std::to_string(rows) + " rows is too large");
        const Stretch stretch = find(ops);
        const uint32_t stride = write_inputs(batch);
        Completion last;
        size_t logits = 0, choices = 0;  // rows done
        Slots slots;
        for (const Cut& cut : cut(batch.segments, !stretch.program.many.empty(), block_rows_)) {
            if (cut.first > 0 && batch.stop && (*batch.stop)()) {
                last.wait();
                return false;
            }
            Block block = make_block(batch, cut, stride);
            const size_t wanted = count_logits(batch, cut, logits);
            const bool apart = wanted > kMostRows;
            if (!apart) want(block, logits, wanted);
            choices += choose(batch, cut, choices, block, slots);
            last = passes_->commit(stretch, cut.many, block);
            block.chosen.reset();
            for (size_t first = 0; apart && first < wanted; first += kMostRows) {
                want(block, logits + first, std::min<size_t>(kMostRows, wanted - first));
                last = passes_->commit_head(stretch.program, block);
                last.wait();
                copy_logits(batch, logits + first, block.wanted);
            }
            if (!apart && wanted > 0) {
                last.wait();
                copy_logits(batch, logits, wanted);
            }
            logits += wanted;
        }
        last.wait();
        for (auto& [slot, counts] : slots) slot.keep(counts ? 1 : 0);
        take_choices(batch);
        return true;
    }

    bool chooses(const Choice& choice) const override {
        return switches_.token_handoff && (choice.temperature <= 0.0f || choice.vocabulary <= kMostSampled);
    }

    std::unique_ptr<Decoder> decoder(std::span<const Op> ops, Sequence& sequence, int32_t token,
                                     const Choice& choice) override {
        // What is left out changes from token to token.
        if (!chooses(choice) || choice.allowed) return nullptr;
        return make_decoder(*passes_, switches_, find(ops), sequence, token, choice);
    }

    std::string describe() const override {
        char size[32];
        std::snprintf(size, sizeof(size), "%.1f", static_cast<double>(weights_->bytes()) / (1 << 20));
        return "metal (" + device_->name() + ", " + size + " MiB of weights read into its memory, " +
               in_units(needs_->block) + " for prompts of " + std::to_string(block_rows_) +
               " rows at a time, prompts by " + path_name(path_) +
               (path_problem_.empty() ? "" : "; tensor operations failed their test: " + path_problem_) +
               (attention_problem_.empty() ? "" : "; attention without them: " + attention_problem_) + ")";
    }

    std::map<std::string, uint64_t> counts() const override {
        const Counts& c = stream_->counts();
        return {{"passes", c.passes},
                {"command buffers", c.command_buffers},
                {"launches", c.launches},
                {"barriers", c.barriers},
                {"stages", c.stages},
                {"bytes read", c.bytes_read},
                {"bytes written", c.bytes_written},
                {"multiply-adds", c.multiply_adds}};
    }

    // Two blocks, so that one is encoded while the other runs.
    int64_t chunk() const override { return 2 * block_rows(path_); }

    std::map<std::string, uint64_t> memory() const override {
        return {{"limit", needs_->limit},
                {"weights", needs_->weights},
                {"prompt buffers", needs_->block},
                {"step buffers", needs_->steps + needs_->partial(needs_->positions)}};
    }

    std::vector<float> read_activation(Activation activation, int64_t first, int64_t rows) override {
        const ActivationUse& use = uses_[static_cast<size_t>(activation)];
        const auto width = static_cast<size_t>(use.width);
        if (first < 0 || first + rows > block_rows_) {
            throw InvalidArgument("only rows of the last block of " + std::to_string(block_rows_) +
                                  " can be read");
        }
        const Placed& place = buffers_.activations[static_cast<size_t>(activation)];
        const std::byte* bytes =
            activation == hidden_ ? buffers_.last_hidden.contents() : place.buffer->contents() + place.offset;
        const size_t begin = static_cast<size_t>(first) * width;
        const size_t count = static_cast<size_t>(rows) * width;
        if (!use.rounded || !switches_.bf16_activations) {
            const auto* from = reinterpret_cast<const float*>(bytes) + begin;
            return {from, from + count};
        }
        const auto* from = reinterpret_cast<const uint16_t*>(bytes) + begin;
        std::vector<float> values(count);
        std::transform(from, from + count, values.begin(), bf16_to_float);
        return values;
    }

  private:
    // Taken for the rows of a batch, and whether the GPU counts the token.
    using Slots = std::vector<std::pair<Adjustments::Slot, bool>>;

    // Of what a draft head reads.
    uint64_t hidden_bytes(int64_t rows) const {
        return hidden_ ? 4 * static_cast<uint64_t>(rows * uses_[static_cast<size_t>(*hidden_)].width) : 0;
    }

    // Chooses the rows of a prompt's blocks, at most those of a pass: as many as their buffers may take an
    // eighth of what is left beside weights and states, so that memory goes to conversations.
    BufferPlan plan_block(int64_t most_rows) {
        block_rows_ = std::max(kMostRows, most_rows);
        if (switches_.chunked_prefill) block_rows_ = std::min(block_rows_, block_rows(path_));
        const int64_t context = std::max<int64_t>(1, context_);
        const uint64_t others = needs_->fixed() + needs_->states(context) + needs_->partial(context);
        const uint64_t left = needs_->limit - std::min(needs_->limit, others);
        for (;; block_rows_ /= 2) {
            BufferPlan plan =
                buffers_.plan_block(uses_, needs_->sizes, switches_, block_rows_, needs_->positions);
            needs_->block = Device::whole_pages(plan.bytes());
            const bool fits = needs_->block <= std::min(left / 8, device_->largest_buffer());
            if (fits || !switches_.chunked_prefill || block_rows_ <= kFewestBlockRows) return plan;
        }
    }

    // Tensor operations are used if they give what simdgroup matrices give.
    void try_path(const Plan& plan) {
        if (path_ == MatrixPath::simdgroup) return;
        const size_t element = switches_.activation_bytes();
        const NormProject* project = nullptr;
        const Attend* attend = nullptr;
        for (const Op& op : plan.lists.front()) {
            if (!project) project = std::get_if<NormProject>(&op);
            if (!attend) attend = std::get_if<Attend>(&op);
        }
        if (project) {
            const DeviceMatrix& weights = *weights_->stack_by_format(project->weights).front();
            path_problem_ = disagreement(path_, weights, *kernels_, *device_, *stream_, element);
        }
        if (!path_problem_.empty()) path_ = MatrixPath::simdgroup;
        if (path_ != MatrixPath::tensor_fragments || !attend || !has_tensor_attention(attend->shape)) return;
        attention_problem_ = attention_disagreement(attend->shape, plan.layouts.front()->kv, *kernels_,
                                                    *device_, *stream_, element);
        tensor_attention_ = attention_problem_.empty();
    }

    // Rows of the cut whose logits are wanted; those before it were `done`.
    static size_t count_logits(const Batch& batch, const Cut& cut, size_t done) {
        size_t end = done;
        while (end < batch.logit_rows.size() && batch.logit_rows[end] < cut.first + cut.rows) ++end;
        return end - done;
    }

    // Logits of the batch's wanted rows [first, first + count).
    void want(Block& block, size_t first, size_t count) const {
        block.wanted = static_cast<uint32_t>(count);
        block.sources = elements(inputs_->sources, first, count);
    }

    Stretch find(std::span<const Op> ops) const {
        for (const std::unique_ptr<Program>& program : programs_) {
            const auto first = static_cast<size_t>(ops.data() - program->ops);
            if (ops.data() >= program->ops && first + ops.size() <= program->few.size())
                return {*program, first, first + ops.size()};
        }
        throw BackendError("the backend wasn't prepared for these operations");
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
        return static_cast<uint32_t>(most);
    }

    // Tokens to choose after rows of the cut, `done` of the batch's before it.
    size_t choose(const Batch& batch, const Cut& cut, size_t done, Block& block, Slots& slots) {
        size_t end = done;
        bool with_options = false, adjusted = false;
        for (; end < batch.chosen_rows.size() && batch.chosen_rows[end].row < cut.first + cut.rows; ++end) {
            const auto& [row, choice, token] = batch.chosen_rows[end];
            inputs_->chosen_sources.as<uint32_t>()[end] = static_cast<uint32_t>(row - cut.first);
            inputs_->options.as<SampleOptions>()[end] = sample_options(*choice);
            inputs_->chosen_positions.as<uint32_t>()[end] = inputs_->positions.as<uint32_t>()[row];
            inputs_->slots.as<uint32_t>()[end] = 0;
            if (choice->adjusts()) {
                slots.emplace_back(passes_->adjustments().take(*choice, passes_->vocabulary(*choice)),
                                   choice->counts != nullptr);
                inputs_->slots.as<uint32_t>()[end] = slots.back().first.number();
                adjusted = true;
            }
            with_options = with_options || adjusted || choice->temperature > 0.0f;
        }
        const size_t count = end - done;
        if (count > 0) {
            block.chosen = Chosen{static_cast<uint32_t>(count),
                                  elements(inputs_->chosen_sources, done, count),
                                  elements(inputs_->chosen_positions, done, count),
                                  elements(inputs_->chosen_tokens, done, count),
                                  elements(inputs_->keys, done, count),
                                  passes_->vocabulary(*batch.chosen_rows[done].choice),
                                  std::nullopt,
                                  std::nullopt};
            if (with_options)
                block.chosen->options = elements(inputs_->options, done, count, sizeof(SampleOptions));
            if (adjusted)
                block.chosen->adjusted = passes_->adjustments().tables(elements(inputs_->slots, done, count));
        }
        return count;
    }

    void take_choices(const Batch& batch) const {
        for (size_t i = 0; i < batch.chosen_rows.size(); ++i) {
            *batch.chosen_rows[i].token =
                chosen_token(inputs_->chosen_tokens.as<uint32_t>()[i], inputs_->keys.as<uint32_t>()[i]);
        }
    }

    Block make_block(const Batch& batch, const Cut& cut, uint32_t stride) {
        const auto begin = static_cast<size_t>(cut.first);
        const int64_t end = cut.first + cut.rows;
        Block block;
        block.rows = static_cast<uint32_t>(cut.rows);
        block.first_row = static_cast<uint32_t>(cut.first);
        block.first_hidden = static_cast<uint32_t>(batch.first_hidden + cut.first);
        block.tokens = elements(inputs_->tokens, begin, block.rows);
        block.positions = elements(inputs_->positions, begin, block.rows);
        block.sequences = elements(inputs_->sequences, begin, block.rows);
        block.pages = elements(inputs_->pages, 0, batch.segments.size() * stride);
        block.table_stride = stride;
        for (uint32_t i = 0; i < batch.segments.size(); ++i) {
            const Segment& s = batch.segments[i];
            const int64_t from = std::max(s.first_row, cut.first);
            const int64_t to = std::min(s.first_row + s.rows, end);
            if (from >= to) continue;
            const DeviceBuffer* state = &DeviceStates::recurrent(s.sequence->recurrent().block());
            block.parts.push_back({state, state, state, static_cast<uint32_t>(from - cut.first),
                                   static_cast<uint32_t>(to - from), i});
            const int64_t length = s.sequence->length() + to - s.first_row;  // after the last row
            block.cache_pages =
                std::max(block.cache_pages, divided(static_cast<uint64_t>(length), kPageTokens));
            for (int64_t row = from; !cut.many && row < to; ++row) {
                block.splits = std::max(block.splits, switches_.splits(length - to + row + 1));
            }
        }
        auto* sources = inputs_->sources.as<uint32_t>();
        for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
            const int32_t row = batch.logit_rows[i];
            if (row >= cut.first && row < end) sources[i] = static_cast<uint32_t>(row - cut.first);
        }
        return block;
    }

    void copy_logits(const Batch& batch, size_t first, size_t count) const {
        std::memcpy(batch.logits + first * vocabulary_, buffers_.logits.contents(),
                    count * vocabulary_ * sizeof(float));
    }

    Switches switches_;
    std::shared_ptr<Device> device_;
    std::vector<std::shared_ptr<DeviceStates>> pools_;  // of each layout
    std::unique_ptr<KernelSet> kernels_;
    std::unique_ptr<Weights> weights_;
    Buffers buffers_;
    size_t vocabulary_ = 0;
    std::vector<std::unique_ptr<Program>> programs_;
    std::vector<ActivationUse> uses_;
    std::optional<Activation> hidden_;  // Builder::hidden
    std::unique_ptr<Inputs> inputs_;
    int64_t max_rows_ = 0;
    int64_t block_rows_ = kMostRows;
    int64_t context_;  // that must fit
    std::optional<MemoryNeeds> needs_;
    MatrixPath path_;
    bool tensor_attention_ = false;
    std::string path_problem_, attention_problem_;  // with better ones
    std::unique_ptr<Passes> passes_;
    std::unique_ptr<CommandStream> stream_;  // waits for the GPU before anything above goes away
};

}  // namespace

std::unique_ptr<Backend> make_metal_backend(const BackendOptions& options) {
    return std::make_unique<MetalBackend>(options);
}

std::vector<CompiledFamily> compile_kernels() {
    Device device;
    Kernels kernels(device);
    std::vector<CompiledFamily> families;
    for (const std::string& family : kernels.families()) {
        CompiledFamily& compiled = families.emplace_back(CompiledFamily{family, 0, ""});
        try {
            for (const std::string& name : kernels.names(family)) {
                kernels.get(family, name);
                ++compiled.kernels;
            }
        } catch (const BackendError& error) {
            compiled.problem = error.what();
        }
    }
    return families;
}

}  // namespace lily::metal
