// Pieces of the Python module that live in files of their own.
#pragma once

namespace lily {

// Makes C++ exceptions arrive as their twins in lily_py.errors.
void register_errors();

}  // namespace lily
