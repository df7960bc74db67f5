// The Metal standard library for kernels that run on the simulator.
#pragma once
#include "atomic.hpp"
#include "barrier.hpp"
#include "binding.hpp"
#include "collective.hpp"
#include "math.hpp"
#include "matrix.hpp"
#include "scalar.hpp"
#include "tensor.hpp"
#include "vector.hpp"

#define is_function_constant_defined(x) (metalsim_constant_##x.defined)

// Address spaces have no meaning on one memory; constant data is const.
#define device
#define thread
#define threadgroup
#define constant const
#define ray_data
