// Decoding that goes on without the host.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "backend/metal/program.h"

namespace lily::metal {

// Two token slots: a step reads one and writes the other. Two states: a step reads one and writes the other,
// so that the one before the step under way is always whole.
std::unique_ptr<Decoder> make_decoder(Passes& passes, const Switches& switches, const Stretch& steps,
                                      Sequence& sequence, int32_t token, const Choice& choice);

}  // namespace lily::metal
