// Launches of metal/attention_prefill.metal and metal/attention_tensor.metal.
#include "backend/metal/rows.h"
#include "backend/metal/self_test.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr const char* kFamily = "attention_prefill";
constexpr const char* kTensorFamily = "attention_tensor";
constexpr uint32_t kThreads = 128;
// Weights rounded to bf16 add a 500th of a typical result, which is a quarter of the largest.
constexpr float kShare = 0.5f;

struct AttentionRowsShape {
    uint32_t rows, heads, kv_heads, pack, stride, page_stride, layer_offset, split_pages, splits;
};

// Rows times heads of a tile, and heads of a tile.
struct Tile {
    Tile(const AttentionShape& s, size_t element, bool packed)
        : rows_heads(element == 4 && s.head_dim == 256 ? 16 : 32),
          pack(std::min(packed ? static_cast<uint32_t>(s.heads / s.kv_heads) : 1u, rows_heads)) {}
    Extent groups(const AttentionShape& s, uint32_t rows) const {
        const auto per_kv = static_cast<uint64_t>(s.heads / s.kv_heads);
        return {static_cast<uint32_t>(s.kv_heads) * divided(per_kv, pack), divided(rows, this->rows())};
    }
    uint32_t rows() const { return rows_heads / pack; }
    uint32_t rows_heads, pack;
};

AttentionRowsShape structure(const AttentionShape& s, const KvLayout& kv, int cache, uint32_t pack,
                             uint32_t rows, uint32_t split_pages, uint32_t splits) {
    return {rows,
            static_cast<uint32_t>(s.heads),
            static_cast<uint32_t>(s.kv_heads),
            pack,
            static_cast<uint32_t>(s.projected()),
            static_cast<uint32_t>(kv.page_bytes() / kv.element_bytes()),
            static_cast<uint32_t>(kv.keys_offset(cache, 0) / kv.element_bytes()),
            split_pages,
            splits};
}

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
          tile_(op.shape, element_, b.switches.gqa_packing),
          by_tensors_(b.tensor_attention),
          attend_(b.kernels.common(), kFamily, cached_kernel("attend_rows", b.kv)),
          tensor_attend_(b.kernels.common(), kTensorFamily, cached_kernel("attend_rows", b.kv)),
          join_(b.kernels.common(), kFamily, "join_splits") {}

    void encode(const Block& block, Pass& pass) const override {
        const Extent tiles = tile_.groups(shape_, block.rows);
        const RowSplits splits(block.rows, tiles.x * tiles.y, block.cache_pages, buffers_.cells);
        attend(block, tiles, splits, pass);
        if (splits.apart > 1) join(block, splits.apart, pass);
    }

  private:
    Range projected(uint32_t rows) const {
        const auto width = static_cast<size_t>(shape_.projected());
        return elements(buffers_.activations[size_t(projected_)], 0, rows * width, element_);
    }
    Range out(uint32_t rows) const {
        const auto width = static_cast<size_t>(shape_.queries());
        return elements(buffers_.activations[size_t(out_)], 0, rows * width, element_);
    }
    Range partial(uint32_t cells) const {
        return elements(buffers_.row_partial, 0, cells * static_cast<size_t>(shape_.queries()));
    }
    Range statistics(uint32_t cells) const {
        return elements(buffers_.row_statistics, 0, cells * static_cast<size_t>(2 * shape_.heads));
    }
    AttentionRowsShape structure(uint32_t rows, uint32_t splits) const {
        return metal::structure(shape_, kv_, cache_, tile_.pack, rows, kRowSplitPages, splits);
    }

    void attend(const Block& block, Extent groups, const RowSplits& splits, Pass& pass) const {
        const uint32_t rows = block.rows;
        const size_t table = size_t{4} * block.table_stride;
        const Range pages(*block.pages->buffer, block.pages->offset + block.parts.at(0).sequence * table,
                          table);
        const Range in = projected(rows), result = out(rows);
        const bool apart = splits.apart > 1;
        const Argument nothing = unused(*result.buffer);
        // A walk writes what it keeps after all splits but the last, and reads it after all but the first.
        const uint64_t walked = apart ? 0 : partial(rows).bytes * (splits.count - 1);
        const uint64_t cached =
            uint64_t{block.cache_pages} * static_cast<uint64_t>(2 * kv_.kv_heads * kv_.plane_bytes());
        const uint64_t length = uint64_t{block.cache_pages} * kPageTokens;
        const uint64_t pairs = rows * (length - std::min<uint64_t>(length, rows / 2));
        groups.z = splits.apart;
        pass.launch(by_tensors_ ? tensor_attend_() : attend_(),
                    {reads(in), reads(*block.positions), reads(pages), reads(*block.cache),
                     apart ? nothing : writes(result),
                     apart              ? writes(partial(rows * splits.apart))
                     : splits.count > 1 ? updates(partial(rows))
                                        : nothing,
                     apart ? writes(statistics(rows * splits.apart)) : nothing,
                     constant(structure(rows, splits.apart))},
                    groups, {kThreads},
                    {.read = in.bytes + cached + walked,
                     .written = apart ? partial(rows * splits.apart).bytes : result.bytes + walked,
                     .multiply_adds = 2 * pairs * static_cast<uint64_t>(shape_.queries())});
    }

    void join(const Block& block, uint32_t splits, Pass& pass) const {
        const uint32_t rows = block.rows;
        pass.launch(join_(),
                    {reads(partial(rows * splits)), reads(statistics(rows * splits)), reads(projected(rows)),
                     reads(*block.positions), writes(out(rows)), constant(structure(rows, splits))},
                    {static_cast<uint32_t>(shape_.heads), rows}, {static_cast<uint32_t>(shape_.head_dim)});
    }

    AttentionShape shape_;
    KvLayout kv_;
    int cache_;
    Activation projected_, out_;
    const Buffers& buffers_;
    size_t element_;
    Tile tile_;
    const bool& by_tensors_;
    OneKernel attend_, tensor_attend_, join_;
};

}  // namespace

bool has_tensor_attention(const AttentionShape& shape) {
    return shape.head_dim == 256 || shape.head_dim == 128;
}

// Three pages, of which the last is begun within a tile.
std::string attention_disagreement(const AttentionShape& shape, const KvLayout& kv, KernelSet& kernels,
                                   Device& device, CommandStream& stream, size_t activation_bytes) try {
    constexpr uint32_t kRows = 37, kFirst = 101, kPages = 3;
    KvLayout one = kv;
    one.layers = 1;
    const auto projected = static_cast<size_t>(kRows * shape.projected());
    const auto count = static_cast<size_t>(kRows * shape.queries());
    const auto cached = static_cast<size_t>(kPages * one.page_bytes());
    const DeviceBuffer in = device.allocate(projected * activation_bytes, "self-test");
    const DeviceBuffer places = device.allocate(4 * (1 + kPages), "self-test");
    const DeviceBuffer cache = device.allocate(cached, "self-test");
    const DeviceBuffer expected = device.allocate(count * activation_bytes, "self-test");
    const DeviceBuffer got = device.allocate(count * activation_bytes, "self-test");
    fill_with_noise(in, projected, activation_bytes);
    fill_with_noise(cache, cached / static_cast<size_t>(kv.element_bytes()),
                    static_cast<size_t>(kv.element_bytes()));
    constexpr uint32_t kPlaces[1 + kPages] = {kFirst, 2, 0, 1};  // the position, the pages
    std::ranges::copy(kPlaces, places.as<uint32_t>());
    const Tile tile(shape, activation_bytes, true);
    Pass pass = stream.begin("self-test");
    for (const auto& [family, out] : {std::pair{kFamily, &expected}, std::pair{kTensorFamily, &got}}) {
        pass.launch(kernels.common().get(family, cached_kernel("attend_rows", kv)),
                    {reads(in), reads(elements(places, 0, 1)), reads(elements(places, 1, kPages)),
                     reads(cache), writes(*out), unused(*out), unused(*out),
                     constant(structure(shape, one, 0, tile.pack, kRows, kPages, 1))},
                    tile.groups(shape, kRows), {kThreads});
    }
    pass.commit().wait();
    return difference(expected, got, count, activation_bytes, kShare, "attention");
} catch (const BackendError& error) {
    return error.what();
}

std::unique_ptr<Step> make_rows_step(const RotaryAppend&, Builder&) { return nullptr; }

std::unique_ptr<Step> make_rows_step(const Attend& op, Builder& b) {
    return std::make_unique<AttendRows>(op, b);
}

}  // namespace lily::metal
