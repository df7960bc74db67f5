// What metal-cpp needs of the Objective-C runtime, provided by libmetalsim on Linux.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct objc_selector* SEL;
typedef struct objc_class* Class;
typedef signed char BOOL;
struct objc_object {
    Class isa;
};
typedef struct objc_object* id;
typedef struct objc_object Protocol;

extern "C" {
Class objc_lookUpClass(const char* name);
Protocol* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);
const char* sel_getName(SEL selector);
}
