// Candidates in the order of their probability, most probable first, the lower id first among equals.
//
// Nothing is sorted. Probabilities are added as integers, without rounding, so that a sum doesn't depend on
// the order of addition: what falls where is exactly what sorting everything, and adding one after the other,
// would say.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace lily {

// A token and its share, not necessarily of 1.
struct Candidate {
    int32_t token;
    float probability;
};

inline bool better(const Candidate& a, const Candidate& b) {
    return a.probability > b.probability || (a.probability == b.probability && a.token < b.token);
}

// A sum of probabilities, in units of 2^-96.
__extension__ using Mass = unsigned __int128;

// The least probability that a candidate may have; it is a whole number of units.
inline constexpr float kLeastProbability = 0x1p-72f;

Mass mass_of(std::span<const Candidate> candidates);
// `numerator` / 2^53 of a mass, rounded down.
Mass share_of(Mass mass, uint64_t numerator);

class Ranking {
  public:
    struct Place {
        Candidate candidate;
        Mass through;  // of all candidates up to this one
    };

    // Prepares for find() among these; returns their mass. Probabilities are in [kLeastProbability, 1].
    Mass count(std::span<const Candidate> candidates);
    // The first candidate, in order, through which the mass is more than `target`, which is less than the
    // mass of all. The candidates are those counted, or as many of the first of them, in order, as it takes.
    Place find(std::span<const Candidate> candidates, Mass target);

  private:
    // One for every exponent from that of kLeastProbability to that of 1, and 7 bits after it.
    static constexpr size_t kBuckets = 73 << 7;

    Mass mass_in(size_t bucket) const;

    std::vector<Candidate> near_;
    std::array<uint64_t, kBuckets> sums_{};
    bool counted_ = false;  // else they are so few that find() looks at all of them
};

}  // namespace lily
