// Launches of metal/attention.metal.
#include <cmath>

#include "backend/metal/step.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr int64_t kFinePositions = 512;  // of the fine rotary table, and between those of the coarse one
constexpr uint32_t kThreads = 128;
constexpr uint32_t kCombineThreads = 256;

struct AttentionParameters {
    uint32_t heads, kv_heads, pairs, stride, table_stride, page_stride, layer_offset, splits, medium_from,
        long_from;
    float eps;
};

// (cos, sin) of `count` positions `step` apart, made in fp64: [count, pairs].
std::vector<float> rotary_table(const AttentionShape& s, int64_t count, int64_t step) {
    std::vector<float> table;
    const int64_t pairs = s.rotary_dim / 2;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const double frequency =
                std::pow(s.rope_theta, -2.0 * static_cast<double>(pair) / static_cast<double>(s.rotary_dim));
            const double angle = static_cast<double>(i * step) * frequency;
            table.push_back(static_cast<float>(std::cos(angle)));
            table.push_back(static_cast<float>(std::sin(angle)));
        }
    }
    return table;
}

class AttentionStep : public Step {
  protected:
    AttentionStep(const AttentionShape& shape, int cache, float eps, Builder& b)
        : shape_(shape),
          kv_(b.kv),
          switches_(b.switches),
          cache_(cache),
          eps_(eps),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()) {}

    AttentionParameters parameters(const Block& block) const {
        return {static_cast<uint32_t>(shape_.heads),
                static_cast<uint32_t>(shape_.kv_heads),
                static_cast<uint32_t>(shape_.rotary_dim / 2),
                static_cast<uint32_t>(shape_.projected()),
                block.table_stride,
                static_cast<uint32_t>(kv_.page_bytes() / kv_.element_bytes()),
                static_cast<uint32_t>(kv_.keys_offset(cache_, 0) / kv_.element_bytes()),
                buffers_.splits,
                switches_.medium_from(),
                switches_.long_from(),
                eps_};
    }

    Range projected(const Block& block, Activation activation) const {
        return elements(buffers_.activations[size_t(activation)], 0,
                        block.rows * static_cast<size_t>(shape_.projected()), element_);
    }

    // Bytes of keys and values of the longest row in this layer.
    uint64_t cache_bytes(const Block& block) const {
        return uint64_t{block.cache_pages} * static_cast<uint64_t>(2 * kv_.kv_heads * kv_.plane_bytes());
    }

    AttentionShape shape_;
    KvLayout kv_;
    const Switches& switches_;
    int cache_;
    float eps_;
    const Buffers& buffers_;
    size_t element_;
};

// Norms of queries and keys, rotation, append: in one launch or three.
class RotaryAppendStep final : public AttentionStep {
  public:
    RotaryAppendStep(const RotaryAppend& op, Builder& b)
        : AttentionStep(op.shape, op.cache, op.eps, b),
          projected_(op.projected),
          q_norm_(b.weights.vector(*op.q_norm)),
          k_norm_(b.weights.vector(*op.k_norm)),
          fused_(b.kernels.common(), "attention", cached_kernel("rotary_append", b.kv)),
          norm_(b.kernels.common(), kUnfused, "norm_heads_d" + std::to_string(b.kv.head_dim)),
          rotate_(b.kernels.common(), kUnfused, "rotate_heads_d" + std::to_string(b.kv.head_dim)),
          append_(b.kernels.common(), kUnfused, cached_kernel("append", b.kv)) {
        if (!b.coarse) {
            b.coarse =
                b.weights.vector(rotary_table(shape_, b.positions / kFinePositions + 1, kFinePositions));
            b.fine = b.weights.vector(rotary_table(shape_, kFinePositions, 1));
        }
        coarse_ = b.coarse;
        fine_ = b.fine;
    }

    void encode(const Block& block, Pass& pass) const override {
        const Range x = projected(block, projected_);
        const auto heads = static_cast<uint32_t>(shape_.heads + shape_.kv_heads);
        if (!switches_.fused_rotary) {
            encode_pieces(block, x, heads, pass);
            return;
        }
        pass.launch(fused_(),
                    {updates(x), reads(*q_norm_), reads(*k_norm_), reads(*coarse_), reads(*fine_),
                     reads(*block.positions), reads(*block.sequences), reads(*block.pages),
                     updates(*block.cache), constant(parameters(block))},
                    {divided(heads, 4), block.rows}, {kThreads},
                    {.read = x.bytes, .written = x.bytes + appended(block)});
    }

  private:
    static constexpr const char* kUnfused = "unfused_attention";
    static constexpr uint32_t kHeadThreads = 32;

    // Bytes of the rows' keys and values in this layer.
    uint64_t appended(const Block& block) const {
        return block.rows * static_cast<uint64_t>(2 * kv_.kv_heads * kv_.plane_bytes() / kPageTokens);
    }

    void encode_pieces(const Block& block, const Range& x, uint32_t heads, Pass& pass) const {
        const AttentionParameters shape = parameters(block);
        const auto kv_heads = static_cast<uint32_t>(shape_.kv_heads);
        pass.launch(norm_(), {updates(x), reads(*q_norm_), reads(*k_norm_), constant(shape)},
                    {heads, block.rows}, {kHeadThreads});
        pass.launch(rotate_(),
                    {updates(x), reads(*coarse_), reads(*fine_), reads(*block.positions), constant(shape)},
                    {heads, block.rows}, {kHeadThreads}, {.read = x.bytes});
        pass.launch(append_(),
                    {reads(x), reads(*block.positions), reads(*block.sequences), reads(*block.pages),
                     updates(*block.cache), constant(shape)},
                    {kv_heads, block.rows}, {kHeadThreads}, {.read = x.bytes, .written = appended(block)});
    }

    Activation projected_;
    const Placed *q_norm_, *k_norm_, *coarse_, *fine_;
    OneKernel fused_, norm_, rotate_, append_;
};

class AttendStep final : public AttentionStep {
  public:
    AttendStep(const Attend& op, Builder& b)
        : AttentionStep(op.shape, op.cache, 0.0f, b),
          projected_(op.projected),
          out_(op.out),
          packed_(b.switches.packed_heads(op.shape.heads / op.shape.kv_heads)),
          attend_(b.kernels.common(), "attention",
                  cached_kernel("attend", b.kv) + "_h" + std::to_string(packed_)),
          combine_(b.kernels.common(), "attention", "attend_combine") {
        b.sizes.at_least(&Sizes::partial, op.shape.queries());
        b.sizes.at_least(&Sizes::statistics, 2 * op.shape.heads);
    }

    void encode(const Block& block, Pass& pass) const override {
        const Range x = projected(block, projected_);
        const auto heads = static_cast<size_t>(shape_.heads);
        const auto dim = static_cast<size_t>(shape_.head_dim);
        const size_t cells = block.rows * heads * buffers_.splits;
        const Range partial = elements(buffers_.partial, 0, cells * dim);
        const Range statistics = elements(buffers_.statistics, 0, cells * 2);
        const AttentionParameters shape = parameters(block);
        const auto per_kv = static_cast<uint64_t>(shape_.heads / shape_.kv_heads);
        const uint32_t readings = divided(per_kv, static_cast<uint64_t>(packed_));
        const uint32_t packs = static_cast<uint32_t>(shape_.kv_heads) * readings;
        const uint64_t results = uint64_t{block.rows} * heads * block.splits * dim * 4;
        pass.launch(attend_(),
                    {reads(x), reads(*block.positions), reads(*block.sequences), reads(*block.pages),
                     reads(*block.cache), writes(partial), writes(statistics), constant(shape)},
                    {packs, block.splits, block.rows}, {kThreads},
                    {.read = x.bytes + block.rows * readings * cache_bytes(block), .written = results});
        const Range out = elements(buffers_.activations[size_t(out_)], 0, block.rows * heads * dim, element_);
        pass.launch(combine_(),
                    {reads(partial), reads(statistics), reads(x), reads(*block.positions), writes(out),
                     constant(shape)},
                    {static_cast<uint32_t>(heads), static_cast<uint32_t>(dim / 32), block.rows},
                    {kCombineThreads}, {.read = results + x.bytes});
    }

  private:
    Activation projected_, out_;
    int packed_;
    OneKernel attend_;
    OneKernel combine_;
};

}  // namespace

std::string cached_kernel(const char* what, const KvLayout& kv) {
    if (kv.dtype != KvDtype::bf16 && kv.dtype != KvDtype::f32) {
        throw BackendError(
            "the Metal backend keeps keys and values as bfloat16 or float32 only; choose kv_dtype");
    }
    const bool known = kv.head_dim == 32 || kv.head_dim == 64 || kv.head_dim == 128 || kv.head_dim == 256;
    const bool fp32 = kv.dtype == KvDtype::f32;
    if (!known || (fp32 && kv.head_dim != 64 && kv.head_dim != 256)) {
        throw BackendError("head_dim is " + std::to_string(kv.head_dim) +
                           "; the Metal backend has kernels for " +
                           (fp32 ? "64 and 256 with kv_dtype='float32'" : "32, 64, 128 and 256"));
    }
    return std::string(what) + (fp32 ? "_float_d" : "_bfloat_d") + std::to_string(kv.head_dim);
}

std::unique_ptr<Step> make_step(const RotaryAppend& op, Builder& b) {
    return std::make_unique<RotaryAppendStep>(op, b);
}

std::unique_ptr<Step> make_step(const Attend& op, Builder& b) {
    b.unfinished.erase(op.out);
    return std::make_unique<AttendStep>(op, b);
}

}  // namespace lily::metal
