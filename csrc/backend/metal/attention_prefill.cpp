// Launches of metal/attention_prefill.metal and metal/attention_tensor.metal.
#include "backend/metal/rows.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "attention_prefill";
constexpr const char* kTensorFamily = "attention_tensor";
constexpr uint32_t kThreads = 128;

struct AttentionRowsShape {
    uint32_t rows, heads, kv_heads, pack, stride, page_stride, layer_offset, split_pages, splits;
};

class AttendRows final : public Step {
  public:
    AttendRows(const Attend& op, Builder& b)
        : shape_(op.shape),
          kv_(b.kv),
          cache_(op.cache),
          projected_(op.projected),
          out_(op.out),
          buffers_(b.buffers),
          element_(b.switches.activation_bytes()),
          tile_(element_ == 4 && op.shape.head_dim == 256 ? 16 : 32),
          pack_(std::min(b.switches.gqa_packing ? static_cast<uint32_t>(shape_.heads / shape_.kv_heads) : 1u,
                         tile_)),
          path_(b.path),
          attend_(b.kernels.common(), kFamily, cached_kernel("attend_rows", b.kv)),
          tensor_attend_(b.kernels.common(), kTensorFamily, cached_kernel("attend_rows", b.kv)) {}

    void encode(const Block& block, Pass& pass) const override {
        const uint32_t rows = block.rows;
        const auto heads = static_cast<uint32_t>(shape_.heads);
        const auto kv_heads = static_cast<uint32_t>(shape_.kv_heads);
        const AttentionRowsShape shape{
            rows,
            heads,
            kv_heads,
            pack_,
            static_cast<uint32_t>(shape_.projected()),
            static_cast<uint32_t>(kv_.page_bytes() / kv_.element_bytes()),
            static_cast<uint32_t>(kv_.keys_offset(cache_, 0) / kv_.element_bytes()),
            block.table_stride,
            1};
        const Range projected = elements(buffers_.activations[size_t(projected_)], 0,
                                         rows * static_cast<size_t>(shape_.projected()), element_);
        const Range out = elements(buffers_.activations[size_t(out_)], 0,
                                   rows * static_cast<size_t>(shape_.queries()), element_);
        const size_t table = size_t{4} * block.table_stride;
        const Range pages(*block.pages->buffer, block.pages->offset + block.parts.at(0).sequence * table,
                          table);
        const uint32_t tile_rows = tile_ / pack_;
        const uint64_t cached =
            uint64_t{block.cache_pages} * 2 * kv_heads * static_cast<uint64_t>(kv_.plane_bytes());
        const uint64_t positions = uint64_t{block.cache_pages} * kPageTokens;
        const uint64_t pairs = rows * (positions - std::min<uint64_t>(positions, rows / 2));
        pass.launch(
            by_tensors() ? tensor_attend_() : attend_(),
            {reads(projected), reads(*block.positions), reads(pages), reads(*block.cache), writes(out),
             unused(*out.buffer), unused(*out.buffer), constant(shape)},
            {kv_heads * divided(heads / kv_heads, pack_), divided(rows, tile_rows), 1}, {kThreads},
            {projected.bytes + out.bytes + cached, 2 * pairs * static_cast<uint64_t>(shape_.queries())});
    }

  private:
    // Tensor operations come with bf16 activations, for these sizes.
    bool by_tensors() const {
        return path_ == MatrixPath::tensor_fragments && (shape_.head_dim == 256 || shape_.head_dim == 128);
    }

    AttentionShape shape_;
    KvLayout kv_;
    int cache_;
    Activation projected_, out_;
    const Buffers& buffers_;
    size_t element_;
    uint32_t tile_, pack_;  // rows times heads of a tile, heads of a tile
    const MatrixPath& path_;
    OneKernel attend_, tensor_attend_;
};

}  // namespace

std::unique_ptr<Step> make_rows_step(const RotaryAppend&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const Attend& op, Builder& b) {
    return std::make_unique<AttendRows>(op, b);
}

}  // namespace lily::metal
