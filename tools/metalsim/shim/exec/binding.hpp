// Binds a kernel's C++ parameters from the dispatch: types come from the function pointer, the sources
// (buffer index, thread position, ...) from the attributes that the rewriter collected.
#pragma once
#include "scalar.hpp"
#include "vector.hpp"

namespace metalsim {
template <class T>
using Identity = T;

// All threadgroup variables of the kernel F, one list per instantiation.
template <auto F>
struct KernelSlots {
    static inline ThreadgroupSlot* list = nullptr;
};
// A variable's slot; a static member, so that it registers when the library is loaded.
template <auto F, class T, int ordinal>
struct ThreadgroupVariable {
    static_assert(alignof(T) <= 16, "threadgroup variables are placed at multiples of 16 bytes");
    static inline ThreadgroupSlot slot{sizeof(T), KernelSlots<F>::list};
};

template <size_t I, class F>
struct ParameterType;
template <size_t I, class First, class... Rest>
struct ParameterType<I, void (*)(First, Rest...)> : ParameterType<I - 1, void (*)(Rest...)> {};
template <class First, class... Rest>
struct ParameterType<0, void (*)(First, Rest...)> {
    using type = First;
};

// An optional reference argument may be unbound; clang may load through a reference speculatively.
alignas(64) inline char unbound_storage[4096];

template <class P>
struct BufferParameter {
    static_assert(std::is_pointer_v<P>, "[[buffer]] argument must be a pointer or reference");
    using Element = std::remove_pointer_t<P>;
    static P get(const Binding& b) { return (P)b.pointer; }
    static constexpr bool is_reference = false;
};
template <class P>
struct BufferParameter<P&> {
    using Element = P;
    static P& get(const Binding& b) { return *(P*)(b.pointer ? b.pointer : unbound_storage); }
    static constexpr bool is_reference = true;
};

namespace binding {
template <class T>
T from_uint3(Uint3 v) {
    if constexpr (std::is_arithmetic_v<T>) {
        return T(v.x);
    } else {
        T r;
        r.x = v.x;
        r.y = v.y;
        if constexpr (sizeof(T) > 2 * sizeof(r.x)) r.z = v.z;
        return r;
    }
}

#define METALSIM_BUILTIN(attribute, expression)                    \
    struct attribute {                                             \
        template <class P>                                         \
        static P get(const Arguments&, const Thread& t) {          \
            (void)t;                                               \
            return from_uint3<std::remove_cv_t<P>>(expression);    \
        }                                                          \
        template <class P>                                         \
        static constexpr ParameterInfo info() {                    \
            return {ParameterKind::builtin, 0, 0, 1, true, false}; \
        }                                                          \
    };
METALSIM_BUILTIN(thread_position_in_grid, t.position_in_grid)
METALSIM_BUILTIN(thread_position_in_threadgroup, t.position_in_threadgroup)
METALSIM_BUILTIN(threadgroup_position_in_grid, t.threadgroup_position)
METALSIM_BUILTIN(thread_index_in_threadgroup, (Uint3{t.index}))
METALSIM_BUILTIN(thread_index_in_simdgroup, (Uint3{t.lane}))
METALSIM_BUILTIN(simdgroup_index_in_threadgroup, (Uint3{t.simdgroup_index}))
METALSIM_BUILTIN(thread_index_in_quadgroup, (Uint3{t.lane % 4}))
METALSIM_BUILTIN(quadgroup_index_in_threadgroup, (Uint3{t.index / 4}))
METALSIM_BUILTIN(threads_per_threadgroup, current_launch->threads_per_threadgroup)
METALSIM_BUILTIN(threads_per_grid, current_launch->threads_per_grid)
METALSIM_BUILTIN(threadgroups_per_grid, current_launch->threadgroups_per_grid)
METALSIM_BUILTIN(dispatch_threads_per_threadgroup, current_launch->dispatch_threads_per_threadgroup)
METALSIM_BUILTIN(threads_per_simdgroup, (Uint3{simd_width}))
METALSIM_BUILTIN(thread_execution_width, (Uint3{simd_width}))
METALSIM_BUILTIN(simdgroups_per_threadgroup,
                 (Uint3{uint32_t((current_launch->threads_per_threadgroup.count() + 31) / 32)}))
METALSIM_BUILTIN(quadgroups_per_threadgroup,
                 (Uint3{uint32_t((current_launch->threads_per_threadgroup.count() + 3) / 4)}))

template <int index, bool optional>
struct buffer {
    template <class P>
    static P get(const Arguments& a, const Thread&) {
        return BufferParameter<P>::get(a.buffers[index]);
    }
    template <class P>
    static constexpr ParameterInfo info() {
        using B = BufferParameter<P>;
        return {optional ? ParameterKind::optional_buffer : ParameterKind::buffer,
                index,
                sizeof(typename B::Element),
                alignof(typename B::Element),
                std::is_const_v<typename B::Element>,
                B::is_reference};
    }
};
template <int index>
struct threadgroup_memory {
    template <class P>
    static P get(const Arguments&, const Thread&) {
        return (P)threadgroup_argument(index);
    }
    template <class P>
    static constexpr ParameterInfo info() {
        return {ParameterKind::threadgroup_memory, index, 0, 1, false, false};
    }
};
}  // namespace binding

template <auto F, class... Sources>
struct KernelRegistration {
    template <size_t... I>
    static void call(const Arguments& a, const Thread& t, std::index_sequence<I...>) {
        F(Sources::template get<typename ParameterType<I, decltype(F)>::type>(a, t)...);
    }
    static void entry(const Arguments& a, const Thread& t) {
        call(a, t, std::index_sequence_for<Sources...>{});
    }
    template <size_t... I>
    static const ParameterInfo* parameters(std::index_sequence<I...>) {
        static const ParameterInfo list[sizeof...(I) + 1] = {
            Sources::template info<typename ParameterType<I, decltype(F)>::type>()..., {}};
        return list;
    }
    KernelRegistration(const char* name, uint32_t max_threads) {
        register_kernel({name, &entry, parameters(std::index_sequence_for<Sources...>{}), sizeof...(Sources),
                         max_threads, &KernelSlots<F>::list});
    }
};
}  // namespace metalsim
