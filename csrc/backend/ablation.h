// Techniques that can be switched off alone, the rest unchanged: `Engine.load(..., ablate={"gqa_packing"})`.
#pragma once

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"

namespace lily {

// A technique by the name that callers use.
template <typename Switches>
using Technique = std::pair<const char*, bool Switches::*>;

// Clears what `ablate` names. `others` are names that the caller of this handles. InvalidArgument, with the
// names there are, for any other.
template <typename Switches>
void switch_off(Switches& switches, std::span<const Technique<Switches>> techniques,
                const std::set<std::string>& ablate, const std::string& backend,
                std::span<const char* const> others = {}) {
    for (const std::string& name : ablate) {
        const auto found = std::ranges::find(techniques, name, &Technique<Switches>::first);
        if (found != techniques.end()) {
            switches.*found->second = false;
        } else if (std::ranges::find(others, name) == others.end()) {
            std::string names;
            const auto list = [&](const char* known) {
                names += (names.empty() ? "" : ", ") + std::string(known);
            };
            for (const auto& technique : techniques) list(technique.first);
            for (const char* other : others) list(other);
            throw InvalidArgument("ablate: the " + backend + " backend has nothing named '" + name +
                                  "' to switch off; it has " + names);
        }
    }
}

}  // namespace lily
