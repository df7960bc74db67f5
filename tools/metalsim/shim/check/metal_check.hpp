// The Metal standard library for the static check.
#pragma once
#include "functions.hpp"
#include "tensor.hpp"
#include "types.hpp"
// OpenCL keywords that Metal allows as identifiers.
#define local msl_identifier_local
#define global msl_identifier_global
#define generic msl_identifier_generic
#define pipe msl_identifier_pipe
#define image2d_t msl_identifier_image2d_t
