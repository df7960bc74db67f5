// Keys and values of the attention layers, in pages of a fixed number of tokens.
//
// A page holds its tokens for every attention layer, so that sharing and copying work on one object.
// Layout per layer and KV head: keys transposed [head_dim, kPageTokens] (neighbouring keys are neighbours),
// then values [kPageTokens, head_dim]. Bytes are followed by their scales, fp32 [scale blocks, kPageTokens],
// in the keys' plane and in the values': number = byte * scale. Shared pages are immutable; a writer copies
// first.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "state/state_memory.h"

namespace lily {

constexpr int64_t kPageTokens = 64;

constexpr int64_t kScaleDims = 64;  // numbers of a key or a value that share a scale

enum class KvDtype : uint8_t { bf16, f32, int8 };

struct KvLayout {
    int64_t layers = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    KvDtype dtype = KvDtype::bf16;
    uint64_t owner = 0;  // the model whose states these are
    std::shared_ptr<StateMemory> memory = heap_memory();

    int64_t element_bytes() const { return dtype == KvDtype::int8 ? 1 : dtype == KvDtype::bf16 ? 2 : 4; }
    int64_t scale_blocks() const {
        return dtype == KvDtype::int8 ? (head_dim + kScaleDims - 1) / kScaleDims : 0;
    }
    int64_t numbers_bytes() const { return kPageTokens * head_dim * element_bytes(); }
    // Keys of one head, or its values, with their scales.
    int64_t plane_bytes() const { return numbers_bytes() + scale_blocks() * kPageTokens * 4; }
    int64_t page_bytes() const { return layers * kv_heads * 2 * plane_bytes(); }
    int64_t keys_offset(int64_t layer, int64_t head) const {
        return (layer * kv_heads + head) * 2 * plane_bytes();
    }
    int64_t values_offset(int64_t layer, int64_t head) const {
        return keys_offset(layer, head) + plane_bytes();
    }
};

class KvPage {
  public:
    explicit KvPage(const KvLayout& layout)
        : block_(layout.memory->allocate(StateUse::page, static_cast<size_t>(layout.page_bytes()))),
          data_(block_->data()) {}
    std::byte* data() { return data_; }
    const std::byte* data() const { return data_; }
    size_t size() const { return block_->size(); }
    const StateBlock& block() const { return *block_; }

  private:
    std::unique_ptr<StateBlock> block_;
    std::byte* data_;
};

// The pages of one sequence; copying it shares them.
class KvCache {
  public:
    explicit KvCache(const KvLayout& layout) : layout_(layout) {}
    KvCache(const KvLayout& layout, std::vector<std::shared_ptr<KvPage>> pages)
        : layout_(layout), pages_(std::move(pages)) {}

    // Makes positions [begin, end) writable: new pages, private copies of shared ones.
    void reserve(int64_t begin, int64_t end);
    // Forgets the pages beyond `length` tokens.
    void truncate(int64_t length);

    const KvLayout& layout() const { return layout_; }
    std::byte* page(int64_t index) { return pages_[static_cast<size_t>(index)]->data(); }
    const std::byte* page(int64_t index) const { return pages_[static_cast<size_t>(index)]->data(); }
    const StateBlock& block(int64_t index) const { return pages_[static_cast<size_t>(index)]->block(); }
    // The first `length` keys and values of a layer as fp32 [length, kv_heads, head_dim], for inspection.
    std::pair<std::vector<float>, std::vector<float>> read(int64_t layer, int64_t length) const;
    int64_t bytes() const { return static_cast<int64_t>(pages_.size()) * layout_.page_bytes(); }
    // Whoever holds a page keeps it as it is: writers then copy it first.
    std::vector<std::shared_ptr<const KvPage>> shared_pages() const { return {pages_.begin(), pages_.end()}; }
    // Address and bytes of each page; sequences that share a page give the same address.
    std::vector<std::pair<uint64_t, int64_t>> blocks() const {
        std::vector<std::pair<uint64_t, int64_t>> result;
        for (const auto& page : pages_) {
            result.emplace_back(reinterpret_cast<uint64_t>(page.get()), layout_.page_bytes());
        }
        return result;
    }

  private:
    KvLayout layout_;
    std::vector<std::shared_ptr<KvPage>> pages_;
};

}  // namespace lily
