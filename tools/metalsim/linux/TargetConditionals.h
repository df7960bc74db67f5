// metal-cpp asks which Apple system it is compiled for: the simulator plays macOS.
#pragma once
#include <math.h>
#define TARGET_OS_OSX 1
