#include <metal_stdlib>
using namespace metal;
constant bool wide [[function_constant(0)]];
constant int lanes [[function_constant(1)]];
constant bool is_wide = is_function_constant_defined(wide) ? wide : false;
constant int step_size = is_wide ? 2 * lanes : lanes;
kernel void k(device int* a [[buffer(0)]], device int* b [[buffer(1), function_constant(is_wide)]]) { a[0] = step_size; if (is_wide) a[1] = b[0]; }
