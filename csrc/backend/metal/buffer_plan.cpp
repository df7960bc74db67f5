#include "backend/metal/buffer_plan.h"

#include <algorithm>
#include <array>

namespace lily::metal {
namespace {

constexpr size_t kAlignment = 256;

constexpr size_t kTimes = 6;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
constexpr size_t index(Needed needed) { return static_cast<size_t>(needed); }

// The time that a time is within; it comes before.
constexpr Needed around(Needed needed) {
    return needed == Needed::in_delta_rule || needed == Needed::in_attention ? Needed::in_mixer
                                                                             : Needed::always;
}

}  // namespace

// Parts of a time follow one another; a time within another begins where that one's own parts end.
std::vector<size_t> BufferPlan::offsets() const {
    std::array<size_t, kTimes> own{}, next{};
    for (const Part& part : parts_) own[index(part.needed)] += aligned(part.bytes);
    for (size_t i = 1; i < kTimes; ++i) {
        const size_t within = index(around(static_cast<Needed>(i)));
        next[i] = next[within] + own[within];
    }
    std::vector<size_t> offsets;
    for (const Part& part : parts_) {
        size_t& at = next[index(part.needed)];
        offsets.push_back(at);
        at += aligned(part.bytes);
    }
    return offsets;
}

size_t BufferPlan::bytes() const {
    size_t most = 0;
    const std::vector<size_t> first = offsets();
    for (size_t i = 0; i < parts_.size(); ++i) most = std::max(most, first[i] + aligned(parts_[i].bytes));
    return most;
}

void BufferPlan::place(const DeviceBuffer& buffer) const {
    const std::vector<size_t> first = offsets();
    for (size_t i = 0; i < parts_.size(); ++i) {
        for (Placed* to : parts_[i].to) *to = {&buffer, first[i], parts_[i].bytes};
    }
}

}  // namespace lily::metal
