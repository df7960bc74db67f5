// The interface between compiled kernels and the simulator's runtime. Plain types only: kernel libraries
// and the runtime are separate shared objects, and nothing with a C++ library type crosses between them.
#pragma once
#include <cstddef>
#include <cstdint>

#define METALSIM_TLS extern __thread __attribute__((tls_model("initial-exec")))

#pragma GCC visibility push(default)
namespace metalsim {

constexpr uint32_t simd_width = 32;
constexpr uint32_t quad_width = 4;
constexpr uint32_t max_bindings = 31;

struct Uint3 {
    uint32_t x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t(x) * y * z; }
};

// Where a collective or a barrier stands in the source; lanes meet when their sites are equal.
struct Site {
    const char* file;
    int line, column;
    const void* operation;
};

struct Thread;
struct Stack;
// Computes the results of a collective for the active lanes (bit i of `active` = lane i).
using Combine = void (*)(Thread** lanes, uint32_t active);

struct Simdgroup {
    Thread* lanes[simd_width];
    uint32_t live, arrived, quad_arrived;
    uint32_t epoch_threadgroup, epoch_device;  // simdgroup_barrier counts per kind of memory
};

struct Thread {
    Uint3 position_in_grid, position_in_threadgroup, threadgroup_position;
    uint32_t index, lane, simdgroup_index;
    Simdgroup* simdgroup;
    void* stack_pointer;
    Stack* stack;
    uint8_t state, wait;
    uint32_t barrier_flags;
    Site site;
    const void* operand;  // of the pending collective
    void* result;
    uint32_t argument;
    Combine combine;
    const volatile void* last_counter;  // of the thread's last atomic read-modify-write
    bool fenced;                        // an atomic_thread_fence of device memory was passed
};

struct Launch {
    Uint3 threads_per_grid, threads_per_threadgroup, threadgroups_per_grid, dispatch_threads_per_threadgroup;
};

METALSIM_TLS Thread* current_thread;
METALSIM_TLS const Launch* current_launch;

void simdgroup_collective(Thread* thread);
void quadgroup_collective(Thread* thread);
void threadgroup_barrier_wait(unsigned flags, Site site);
void simdgroup_barrier_wait(unsigned flags, Site site);
enum class AtomicKind : uint8_t { load, store, read_modify_write };
// An atomic access that is about to happen.
void atomic_access(const volatile void* address, unsigned size, AtomicKind kind, void* pc);
// The counter's atomic read-modify-write orders device memory between threadgroups from here on.
void ordered_counter(const volatile void* address);
void thread_fence(unsigned flags);
void report_from_kernel(const char* kind, const char* message, void* pc);
void misaligned_vector(const void* address, unsigned alignment, void* pc);

// ---- what a library offers, registered while it is loaded ------------------------------------------

struct Binding {
    char* pointer = nullptr;  // includes the offset
    uint64_t length = 0;
    bool bound = false;
};
struct Arguments {
    Binding buffers[max_bindings];
    uint32_t threadgroup_length[max_bindings] = {};
    uint32_t threadgroup_offset[max_bindings] = {};
};
METALSIM_TLS const Arguments* current_arguments;
void* threadgroup_argument(unsigned index);

enum class ParameterKind : uint8_t { builtin, buffer, optional_buffer, threadgroup_memory };
struct ParameterInfo {
    ParameterKind kind;
    int index;
    uint32_t element_size, alignment;
    bool is_const, is_reference;
};

struct ThreadgroupSlot {
    uint32_t size;
    const char* name = "";
    uint64_t dispatch = 0;
    uint32_t offset = 0;
    ThreadgroupSlot* next;
    ThreadgroupSlot(uint32_t bytes, ThreadgroupSlot*& list) : size(bytes), next(list) { list = this; }
    void* address(const char* variable);
    template <class T>
    T& get(const char* variable) {
        return *static_cast<T*>(address(variable));
    }
};

struct KernelInfo {
    const char* name;
    void (*entry)(const Arguments&, const Thread&);
    const ParameterInfo* parameters;
    uint32_t parameter_count, max_threads;
    ThreadgroupSlot* const* slots;  // list of the kernel's threadgroup variables
};
void register_kernel(const KernelInfo& info);

struct FunctionConstant {
    int index;
    const char* name;
    void* storage;
    uint32_t size;
    bool defined = false;
    FunctionConstant(int index, const char* name, void* storage, uint32_t size);
};
// A constant that is computed from function constants: evaluated when it is read.
template <class T>
struct DerivedConstant {
    T (*evaluate)();
    operator T() const { return evaluate(); }
};

}  // namespace metalsim
#pragma GCC visibility pop
