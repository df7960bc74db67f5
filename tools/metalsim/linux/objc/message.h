// Message sends of the Objective-C runtime, provided by libmetalsim on Linux.
#pragma once
#include "runtime.h"

extern "C" {
void objc_msgSend(void);
void objc_msgSend_stret(void);
void objc_msgSend_fpret(void);
}
