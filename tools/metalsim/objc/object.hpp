// A small Objective-C runtime: classes with method tables, reference counts, autorelease pools, and zombies
// that name a use after release. Misuse that would crash or leak on a Mac ends the process with a message.
#pragma once
#include <objc/runtime.h>

#include <atomic>
#include <string>
#include <unordered_map>
#include <vector>

struct objc_class {
    objc_class* isa;
    std::string name;
    std::unordered_map<const void*, void*> methods;
    void (*finish)(void* object) = nullptr;  // lets go of what the object holds
    void (*destroy)(void* object) = nullptr;
    objc_class* zombie = nullptr;  // class of its objects after release
    std::atomic<long> live{0};
};

namespace metalsim::objc {

// Ends the process: the host broke a rule whose breach Metal does not survive.
[[noreturn]] void misuse(const std::string& message);

struct Object : objc_object {
    std::atomic<long> references{1};
    std::string label;
    void finish() {}
};

Object* retain(Object* object);
void release(Object* object);
void autorelease(Object* object);

template <class T>
T* retained(T* object) {
    retain(object);
    return object;
}
template <class T>
T* autoreleased(T* object) {
    if (object) autorelease(object);
    return object;
}

// A pool for a scope of the simulator's own threads.
class PoolScope {
  public:
    PoolScope();
    ~PoolScope();
    PoolScope(const PoolScope&) = delete;
    PoolScope& operator=(const PoolScope&) = delete;

  private:
    Object* pool_;
};

objc_class* find_class(const char* name);
void adopt(Object* object, objc_class* cls);

// Methods are captureless lambdas: (object, selector, arguments...).
template <class F>
void method(const char* cls, const char* selector, F f) {
    find_class(cls)->methods[sel_registerName(selector)] = reinterpret_cast<void*>(+f);
}
template <class F>
void class_method(const char* cls, const char* selector, F f) {
    find_class(cls)->isa->methods[sel_registerName(selector)] = reinterpret_cast<void*>(+f);
}

void add_object_methods(const char* cls);

// Declares a class whose objects are T.
template <class T>
void declare_class(const char* cls) {
    add_object_methods(cls);
    find_class(cls)->finish = [](void* o) { static_cast<T*>(static_cast<Object*>(o))->finish(); };
    find_class(cls)->destroy = [](void* o) { delete static_cast<T*>(static_cast<Object*>(o)); };
    class_method(cls, "alloc", [](objc_class* c, SEL) {
        T* object = new T;
        adopt(object, c);
        return object;
    });
}

template <class T>
T* make(const char* cls) {
    T* object = new T;
    adopt(object, find_class(cls));
    return object;
}

// Objects alive, of one class (by name) or of all (nullptr).
long live_objects(const char* cls);

// Each file of the library declares its classes here.
void declare_foundation();
void declare_device();
void declare_library();
void declare_command();
void declare_encoders();
void declare_events();

}  // namespace metalsim::objc
