// Functions that instrumented kernels call. Kernels are compiled with -fsanitize=thread and some of
// -fsanitize=undefined but linked without those runtimes: here they reach the checker instead.
#include <cstdint>
#include <cstring>
#include <string>

#include "diagnostics.hpp"
#include "fibers.hpp"
#include "shadow.hpp"

using metalsim::report;
using metalsim::shadow::Access;

namespace {

constexpr uintptr_t stack_reach = 256 << 10;  // of a fiber

void check(void* p, unsigned size, Access kind, void* pc, bool aligned) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    // Most accesses outside the arena are to the thread's own stack, above this frame.
    if (address - reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) < stack_reach) return;
    // Where the compiler does not use the "unaligned" forms it takes natural alignment for granted.
    unsigned needed = size < 8 ? size : 8;
    if (aligned && metalsim::shadow::group.running && (address & (needed - 1)))
        report("misaligned", std::to_string(size) + "-byte access at an address that is not aligned", {pc});
    metalsim::shadow::access(address, size, kind, pc);
}

struct SourceLocation {
    const char* file;
    uint32_t line, column;
    std::string text() const {
        const char* name = strrchr(file, '/');
        return std::string(name ? name + 1 : file) + ":" + std::to_string(line);
    }
};

}  // namespace

#define CALLER __builtin_return_address(0)
#define EXPORT __attribute__((visibility("default")))
// Macros because the compiler prescribes one function per size.
#define ACCESS(name, n, kind, aligned) \
    EXPORT void __tsan_##name##n(void* p) { check(p, n, kind, CALLER, aligned); }
#define ACCESSES(n)                                           \
    ACCESS(read, n, Access::read, true)                       \
    ACCESS(write, n, Access::write, true)                     \
    ACCESS(unaligned_read, n, Access::read, false)            \
    ACCESS(unaligned_write, n, Access::write, false)          \
    ACCESS(volatile_read, n, Access::read, true)              \
    ACCESS(volatile_write, n, Access::write, true)            \
    ACCESS(unaligned_volatile_read, n, Access::read, false)   \
    ACCESS(unaligned_volatile_write, n, Access::write, false) \
    EXPORT void __tsan_read_write##n(void* p) {               \
        check(p, n, Access::read, CALLER, true);              \
        check(p, n, Access::write, CALLER, true);             \
    }                                                         \
    EXPORT void __tsan_unaligned_read_write##n(void* p) {     \
        check(p, n, Access::read, CALLER, false);             \
        check(p, n, Access::write, CALLER, false);            \
    }

extern "C" {
EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
EXPORT void __tsan_read_range(void* p, unsigned long n) {
    check(p, unsigned(n), Access::read, CALLER, false);
}
EXPORT void __tsan_write_range(void* p, unsigned long n) {
    check(p, unsigned(n), Access::write, CALLER, false);
}
EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
    check(const_cast<void*>(from), unsigned(n), Access::read, CALLER, false);
    check(to, unsigned(n), Access::write, CALLER, false);
    return memcpy(to, from, n);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
    check(const_cast<void*>(from), unsigned(n), Access::read, CALLER, false);
    check(to, unsigned(n), Access::write, CALLER, false);
    return memmove(to, from, n);
}
EXPORT void* __tsan_memset(void* to, int value, size_t n) {
    check(to, unsigned(n), Access::write, CALLER, false);
    return memset(to, value, n);
}

EXPORT void __ubsan_handle_out_of_bounds(const SourceLocation* at, uintptr_t index) {
    report("array-bounds", "index " + std::to_string(intptr_t(index)) + " is outside its array",
           {nullptr, at->text()});
    metalsim::fibers::abandon_dispatch();
}
EXPORT void __ubsan_handle_local_out_of_bounds() {
    report("array-bounds", "access outside a variable of the thread", {CALLER});
    metalsim::fibers::abandon_dispatch();
}
EXPORT void __ubsan_handle_shift_out_of_bounds(const SourceLocation* at, uintptr_t, uintptr_t by) {
    report("shift", "shift by " + std::to_string(intptr_t(by)) + ", or of a negative value",
           {nullptr, at->text()});
}
EXPORT void __ubsan_handle_divrem_overflow(const SourceLocation* at, uintptr_t, uintptr_t) {
    report("division", "integer division by zero, or overflow", {nullptr, at->text()});
    metalsim::fibers::abandon_dispatch();  // going on would end the process
}

// float to bfloat, which compilers call as a library function; rounds to nearest even.
EXPORT __bf16 __truncsfbf2(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t high = f != f ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    __bf16 result;
    memcpy(&result, &high, sizeof result);
    return result;
}
}
