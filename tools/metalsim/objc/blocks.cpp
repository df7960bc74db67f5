// The Blocks runtime: copying closures from the stack to the heap, by the published block ABI.
#include "blocks.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int has_copy_dispose = 1 << 25, is_global = 1 << 28, needs_free = 1 << 24;
constexpr int block_field = 7, byref_field = 8, byref_caller = 128;

struct Descriptor {
    unsigned long reserved, size;
    void (*copy)(void* to, const void* from);
    void (*dispose)(const void* block);
};
struct Block {
    void* isa;
    int flags;
    std::atomic<int> references;  // the ABI's reserved word
    void (*invoke)();
    Descriptor* descriptor;
};
// A `__block` variable; the count is kept in the low bits of the flags.
struct Reference {
    void* isa;
    Reference* forwarding;
    int flags;
    unsigned int size;
    void (*keep)(Reference* to, Reference* from);
    void (*destroy)(Reference* self);
};
constexpr int count_unit = 2, count_mask = 0xFFFE;

Reference* copy_reference(Reference* from) {
    if (from->forwarding->flags & needs_free) {
        __atomic_fetch_add(&from->forwarding->flags, count_unit, __ATOMIC_RELAXED);
        return from->forwarding;
    }
    auto* heap = static_cast<Reference*>(malloc(from->size));
    memcpy(heap, from, from->size);
    heap->flags = (from->flags & ~count_mask) | needs_free | 2 * count_unit;  // the stack frame and the block
    heap->forwarding = heap;
    from->forwarding = heap;
    if (from->flags & has_copy_dispose) from->keep(heap, from);
    return heap;
}

void release_reference(Reference* r) {
    r = r->forwarding;
    if (!(r->flags & needs_free)) return;
    int before = __atomic_fetch_sub(&r->flags, count_unit, __ATOMIC_ACQ_REL);
    if ((before & count_mask) != count_unit) return;
    if (r->flags & has_copy_dispose) r->destroy(r);
    free(r);
}

}  // namespace

extern "C" {

EXPORT void* _NSConcreteStackBlock[32];
EXPORT void* _NSConcreteGlobalBlock[32];
EXPORT void* _NSConcreteMallocBlock[32];

EXPORT void* _Block_copy(const void* argument) {
    auto* from = static_cast<Block*>(const_cast<void*>(argument));
    if (!from) return nullptr;
    if (from->flags & is_global) return from;
    if (from->flags & needs_free) {
        from->references++;
        return from;
    }
    auto* heap = static_cast<Block*>(malloc(from->descriptor->size));
    memcpy(static_cast<void*>(heap), from, from->descriptor->size);
    heap->isa = _NSConcreteMallocBlock;
    heap->flags |= needs_free;
    heap->references = 1;
    if (heap->flags & has_copy_dispose) heap->descriptor->copy(heap, from);
    return heap;
}

EXPORT void _Block_release(const void* argument) {
    auto* block = static_cast<Block*>(const_cast<void*>(argument));
    if (!block || !(block->flags & needs_free)) return;
    if (--block->references) return;
    if (block->flags & has_copy_dispose) block->descriptor->dispose(block);
    free(block);
}

EXPORT void _Block_object_assign(void* to, const void* from, int flags) {
    auto** slot = static_cast<const void**>(to);
    if (flags & byref_field)
        *slot = copy_reference(static_cast<Reference*>(const_cast<void*>(from)));
    else if ((flags & block_field) == block_field && !(flags & byref_caller))
        *slot = _Block_copy(from);
    else
        *slot = from;
}

EXPORT void _Block_object_dispose(const void* object, int flags) {
    if (flags & byref_field)
        release_reference(static_cast<Reference*>(const_cast<void*>(object)));
    else if ((flags & block_field) == block_field && !(flags & byref_caller))
        _Block_release(object);
}

}  // extern "C"
