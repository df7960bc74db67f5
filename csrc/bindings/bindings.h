// Pieces of the Python module that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace lily {

// The submodule `bench`: this machine's limits.
void bind_bench(nanobind::module_& m);

// Prefix and Sequence.
void bind_state(nanobind::module_& m);

// What brings saved states back; after bind_state and the model.
void bind_restore(nanobind::module_& m);

// Makes C++ exceptions arrive as their twins in lily_py.errors.
void register_errors();

}  // namespace lily
