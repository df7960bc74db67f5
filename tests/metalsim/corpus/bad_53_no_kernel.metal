#include <metal_stdlib>
using namespace metal;
float twice(float x) { return 2.0f * x; }
