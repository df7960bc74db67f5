// Pieces of the Python module that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// The submodule `bench`: this machine's limits.
void bind_bench(nanobind::module_& m);

// Makes C++ exceptions arrive as their twins in lily_py.errors.
void register_errors();

}  // namespace lily
