#pragma once
#include <metal_stdlib>
#if __METAL_VERSION__ < 400
#error "MetalPerformancePrimitives needs Metal 4.0"
#endif
