#include "state/restore.h"

#include <cstring>
#include <string>

#include "base/error.h"

namespace lily {
namespace {

void require_size(const std::string& what, size_t given, int64_t expected) {
    if (given != static_cast<size_t>(expected)) {
        throw InvalidArgument(what + " has " + std::to_string(given) + " bytes, this model's has " +
                              std::to_string(expected));
    }
}

std::shared_ptr<const RecurrentState> restore_recurrent(const RecurrentLayout& layout, Bytes bytes) {
    require_size("a saved recurrent state", bytes.size(), layout.bytes());
    auto state = std::make_shared<RecurrentState>(layout);
    if (!bytes.empty()) std::memcpy(state->bytes().data(), bytes.data(), bytes.size());
    return state;
}

}  // namespace

std::unique_ptr<Prefix> restore_prefix(const StateLayout& layout, std::vector<int32_t> tokens,
                                       std::span<const Bytes> pages, Bytes recurrent) {
    if (tokens.empty()) throw InvalidArgument("a saved state has no tokens");
    const size_t count = (tokens.size() + kPageTokens - 1) / kPageTokens;
    if (pages.size() != count) {
        throw InvalidArgument("a saved state of " + std::to_string(tokens.size()) + " tokens needs " +
                              std::to_string(count) + " pages, got " + std::to_string(pages.size()));
    }
    std::vector<std::shared_ptr<KvPage>> restored;
    for (const Bytes page : pages) {
        require_size("a saved page", page.size(), layout.kv.page_bytes());
        restored.push_back(std::make_shared<KvPage>(layout.kv));
        if (!page.empty()) std::memcpy(restored.back()->data(), page.data(), page.size());
    }
    return std::make_unique<Prefix>(std::move(tokens), KvCache(layout.kv, std::move(restored)),
                                    restore_recurrent(layout.recurrent, recurrent));
}

std::unique_ptr<Sequence> restore_sequence(const Prefix& prefix,
                                           std::span<const std::pair<int64_t, Bytes>> earlier) {
    auto sequence = std::make_unique<Sequence>(prefix);
    for (const auto& [length, bytes] : earlier) {
        if (length < 1 || length >= prefix.length()) {
            throw InvalidArgument("a snapshot at " + std::to_string(length) + " tokens isn't within the " +
                                  std::to_string(prefix.length()) + " saved");
        }
        sequence->add_snapshot(length, restore_recurrent(prefix.recurrent()->layout(), bytes));
    }
    return sequence;
}

}  // namespace lily
