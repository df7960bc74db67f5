// The one IOSurface type that metal-cpp names, for builds without Apple's SDK.
#pragma once
typedef struct __IOSurface* IOSurfaceRef;
