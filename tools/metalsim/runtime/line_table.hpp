// From an instruction of a loaded kernel library to its line in the .metal source.
#pragma once
#include <string>

namespace metalsim {

// "file:line" of the call that returns to `return_address`, or "" if it is not known. The libraries are
// built with DWARF 4 line tables, which this reads itself: no symboliser is needed on the machine.
std::string source_line(const void* return_address);

}  // namespace metalsim
