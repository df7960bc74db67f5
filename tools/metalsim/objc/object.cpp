#include "object.hpp"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "metalsim.h"

#define EXPORT __attribute__((visibility("default")))

namespace metalsim::objc {

namespace {

template <class T>
T& immortal() {
    static T* instance = new T;
    return *instance;
}

struct Classes {
    std::recursive_mutex mutex;
    std::map<std::string, objc_class*> by_name;
};

objc_class* new_class(const std::string& name) {
    auto* cls = new objc_class{};
    cls->name = name;
    return cls;
}

struct Pool : Object {
    std::vector<Object*> objects;
    bool entered = false;
    void finish();
};
thread_local std::vector<Pool*> pools;

void Pool::finish() {
    if (!entered) return;
    if (pools.empty() || pools.back() != this) misuse("autorelease pools released out of order");
    pools.pop_back();
    for (Object* o : objects) release(o);
}

// Released objects keep their memory until 4,096 later ones were released.
struct Zombies {
    std::mutex mutex;
    std::deque<std::pair<Object*, objc_class*>> queue;
};
constexpr size_t zombie_limit = 4096;

void bury(Object* object) {
    objc_class* cls = object->isa;
    cls->live--;
    if (cls->finish) cls->finish(object);
    Zombies& z = immortal<Zombies>();
    std::lock_guard lock(z.mutex);
    if (!cls->zombie) cls->zombie = new_class("!" + cls->name);
    object->isa = cls->zombie;
    z.queue.push_back({object, cls});
    if (z.queue.size() > zombie_limit) {
        auto [oldest, its_class] = z.queue.front();
        z.queue.pop_front();
        if (its_class->destroy) its_class->destroy(oldest);
    }
}

void declare_all() {
    declare_class<Pool>("NSAutoreleasePool");
    method("NSAutoreleasePool", "init", [](Pool* p, SEL) {
        p->entered = true;
        pools.push_back(p);
        return p;
    });
    method("NSAutoreleasePool", "drain", [](Pool* p, SEL) { release(p); });
    method("NSAutoreleasePool", "addObject:", [](Pool* p, SEL, Object* o) { p->objects.push_back(o); });
    declare_class<Object>("NSObject");
    declare_foundation();
    declare_device();
    declare_library();
    declare_command();
    declare_encoders();
    declare_events();
}

}  // namespace

void misuse(const std::string& message) {
    fprintf(stderr, "metalsim: %s\n", message.c_str());
    fflush(stderr);
    abort();
}

objc_class* find_class(const char* name) {
    Classes& c = immortal<Classes>();
    std::lock_guard lock(c.mutex);
    objc_class*& cls = c.by_name[name];
    if (!cls) {
        cls = new_class(name);
        cls->isa = new_class(std::string("+") + name);
    }
    return cls;
}

void adopt(Object* object, objc_class* cls) {
    object->isa = cls;
    cls->live++;
}

Object* retain(Object* object) {
    if (object) object->references++;
    return object;
}

void release(Object* object) {
    if (!object) return;
    long left = --object->references;
    if (left < 0) misuse("over-release of " + object->isa->name);
    if (left == 0) bury(object);
}

void autorelease(Object* object) {
    if (pools.empty()) misuse(object->isa->name + " autoreleased without a pool in place: it would leak");
    pools.back()->objects.push_back(object);
}

PoolScope::PoolScope() {
    Pool* p = make<Pool>("NSAutoreleasePool");
    p->entered = true;
    pools.push_back(p);
    pool_ = p;
}
PoolScope::~PoolScope() { release(pool_); }

void add_object_methods(const char* cls) {
    method(cls, "retain", [](Object* o, SEL) { return retain(o); });
    method(cls, "release", [](Object* o, SEL) { release(o); });
    method(cls, "autorelease", [](Object* o, SEL) { return autoreleased(o); });
    method(cls, "retainCount",
           [](Object* o, SEL) { return static_cast<unsigned long>(o->references.load()); });
    method(cls, "init", [](Object* o, SEL) { return o; });
    method(cls, "hash", [](Object* o, SEL) { return reinterpret_cast<unsigned long>(o); });
    method(cls, "isEqual:", [](Object* o, SEL, Object* other) { return o == other; });
    method(cls, "respondsToSelector:", [](Object* o, SEL, SEL s) { return o->isa->methods.count(s) != 0; });
    method(cls, "methodSignatureForSelector:", [](Object*, SEL, SEL) -> void* { return nullptr; });
}

long live_objects(const char* name) {
    Classes& c = immortal<Classes>();
    std::lock_guard lock(c.mutex);
    long total = 0;
    for (auto& [key, cls] : c.by_name)
        if (!name || key == name) total += cls->live;
    return total;
}

// Called by objc_msgSend below: the method's address.
extern "C" __attribute__((visibility("hidden"), used)) void* metalsim_find_method(objc_object* self,
                                                                                  SEL selector) {
    auto found = self->isa->methods.find(selector);
    if (found != self->isa->methods.end()) return found->second;
    const std::string& name = self->isa->name;
    if (name[0] == '!')
        misuse("message '" + std::string(sel_getName(selector)) + "' sent to a released " + name.substr(1));
    std::string receiver = name[0] == '+' ? "+[" + name.substr(1) : "-[" + name;
    misuse(receiver + " " + sel_getName(selector) + "] is not implemented by the simulator");
}

}  // namespace metalsim::objc

using namespace metalsim::objc;

extern "C" {

EXPORT SEL sel_registerName(const char* name) {
    static auto* mutex = new std::mutex;
    std::lock_guard lock(*mutex);
    return reinterpret_cast<SEL>(
        const_cast<char*>(immortal<std::set<std::string>>().insert(name).first->c_str()));
}
EXPORT const char* sel_getName(SEL selector) { return reinterpret_cast<const char*>(selector); }

EXPORT Class objc_lookUpClass(const char* name) {
    static std::once_flag once;
    std::call_once(once, declare_all);
    objc_class* cls = find_class(name);
    return cls->methods.empty() && cls->isa->methods.empty() ? nullptr : cls;
}
EXPORT Protocol* objc_getProtocol(const char*) { return nullptr; }

long metalsim_live_objects(const char* class_name) { return live_objects(class_name); }

}  // extern "C"

// objc_msgSend: finds the method and jumps to it with all arguments in place; messages to nil return zero.
// The _stret form has the result's address as hidden first argument.
asm(R"(.text
.macro METALSIM_SEND name, object, selector
.globl \name
.type \name,@function
\name:
  testq \object, \object
  jz 1f
  pushq %rbp
  movq %rsp, %rbp
  subq $192, %rsp
  andq $-16, %rsp
  movq %rdi, 0(%rsp); movq %rsi, 8(%rsp); movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp); movq %r8, 32(%rsp); movq %r9, 40(%rsp)
  movups %xmm0, 48(%rsp); movups %xmm1, 64(%rsp); movups %xmm2, 80(%rsp); movups %xmm3, 96(%rsp)
  movq \object, %rax
  movq \selector, %rsi
  movq %rax, %rdi
  call metalsim_find_method
  movq %rax, %r11
  movq 0(%rsp), %rdi; movq 8(%rsp), %rsi; movq 16(%rsp), %rdx
  movq 24(%rsp), %rcx; movq 32(%rsp), %r8; movq 40(%rsp), %r9
  movups 48(%rsp), %xmm0; movups 64(%rsp), %xmm1; movups 80(%rsp), %xmm2; movups 96(%rsp), %xmm3
  leave
  jmp *%r11
1: xorl %eax, %eax
  xorl %edx, %edx
  xorps %xmm0, %xmm0
  ret
.size \name,.-\name
.endm
METALSIM_SEND objc_msgSend, %rdi, %rsi
METALSIM_SEND objc_msgSend_fpret, %rdi, %rsi
METALSIM_SEND objc_msgSend_stret, %rsi, %rdx
)");
