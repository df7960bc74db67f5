// Native state from bytes that were saved from it. The bytes are plain: what a Prefix's pages and recurrent
// state hold, in this machine's byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "state/sequence.h"

namespace lily {

using Bytes = std::span<const std::byte>;

// A prefix of `tokens`. InvalidArgument unless there is exactly one page for every kPageTokens tokens begun,
// and each piece has the size that the layout asks for.
std::unique_ptr<Prefix> restore_prefix(const StateLayout& layout, std::vector<int32_t> tokens,
                                       std::span<const Bytes> pages, Bytes recurrent);

// A sequence that continues from a prefix and can also go back to earlier lengths, whose recurrent states are
// given. InvalidArgument for a length that isn't within the prefix, or a piece of another size.
std::unique_ptr<Sequence> restore_sequence(const Prefix& prefix,
                                           std::span<const std::pair<int64_t, Bytes>> earlier);

}  // namespace lily
