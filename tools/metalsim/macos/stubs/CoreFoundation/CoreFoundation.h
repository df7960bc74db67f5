// What metal-cpp needs of CoreFoundation, for builds without Apple's SDK.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;
CFStringRef __CFStringMakeConstantString(const char* text);
#ifdef __cplusplus
}
#endif
