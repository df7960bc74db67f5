#include "runtime/ranking.h"

#include <algorithm>
#include <bit>

namespace lily {
namespace {

// So few candidates are halved at once, without a look at all of them before.
constexpr size_t kFew = 2048;

constexpr uint32_t kLeastBits = std::bit_cast<uint32_t>(kLeastProbability);

// A float in [2^-72, 1] is `mantissa` times a power of two that its exponent gives.
uint64_t mantissa(uint32_t bits) { return (bits & 0x7fffffu) | 0x800000u; }
int shift(uint32_t bits) { return static_cast<int>(bits >> 23) - (127 + 23 - 96); }

Mass mass_of(const Candidate& candidate) {
    const auto bits = std::bit_cast<uint32_t>(candidate.probability);
    return static_cast<Mass>(mantissa(bits)) << shift(bits);
}

size_t bucket_of(const Candidate& candidate) {
    return (std::bit_cast<uint32_t>(candidate.probability) - kLeastBits) >> 16;
}

}  // namespace

Mass mass_of(std::span<const Candidate> candidates) {
    Mass total = 0;
    for (const Candidate& candidate : candidates) total += mass_of(candidate);
    return total;
}

Mass share_of(Mass mass, uint64_t numerator) {
    const Mass high = mass >> 64, low = static_cast<uint64_t>(mass);
    return (high * numerator << 11) + (low * numerator >> 53);
}

Mass Ranking::count(std::span<const Candidate> candidates) {
    counted_ = candidates.size() > kFew;
    if (!counted_) return mass_of(candidates);
    sums_.fill(0);
    for (const Candidate& c : candidates) {
        sums_[bucket_of(c)] += mantissa(std::bit_cast<uint32_t>(c.probability));
    }
    Mass total = 0;
    for (size_t bucket = 0; bucket < kBuckets; ++bucket) total += mass_in(bucket);
    return total;
}

Mass Ranking::mass_in(size_t bucket) const {
    return static_cast<Mass>(sums_[bucket]) << shift(kLeastBits + (static_cast<uint32_t>(bucket) << 16));
}

Ranking::Place Ranking::find(std::span<const Candidate> candidates, Mass target) {
    Mass before = 0;
    if (!counted_) {
        near_.assign(candidates.begin(), candidates.end());
    } else {
        size_t bucket = kBuckets - 1;
        for (; target >= before + mass_in(bucket); --bucket) before += mass_in(bucket);
        near_.clear();
        for (const Candidate& c : candidates) {
            if (bucket_of(c) == bucket) near_.push_back(c);
        }
    }
    // The better half or the other one, until one is left.
    auto first = near_.begin();
    auto last = near_.end();
    while (last - first > 1) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, better);
        const Mass mass = mass_of({first, middle});
        if (target < before + mass) {
            last = middle;
        } else {
            before += mass;
            first = middle;
        }
    }
    return {*first, before + mass_of(*first)};
}

}  // namespace lily
