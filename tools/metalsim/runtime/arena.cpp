#include "arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "config.hpp"
#include "shadow.hpp"

namespace metalsim::arena {

namespace {

struct Region {
    uint64_t offset, length;
};

struct State {
    uint32_t* page_owner = nullptr;
    std::vector<Buffer*> buffers{nullptr};
    std::vector<uint32_t> free_ids;
    std::map<uintptr_t, Buffer*> host;           // by first address
    std::deque<Region> quarantine;               // freed, kept inaccessible for a while
    std::multimap<uint64_t, uint64_t> reusable;  // length -> offset
    uint64_t bump = page, allocated = 0;
};
State* state;

char* address(uint64_t offset) { return reinterpret_cast<char*>(base + offset); }

void* reserve(uintptr_t at, uint64_t length, int protection) {
    void* p = mmap(reinterpret_cast<void*>(at), length, protection,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (p != reinterpret_cast<void*>(at)) {
        perror("metalsim: cannot reserve address space");
        abort();
    }
    return p;
}

// Freed addresses stay inaccessible until 1,024 later frees or half of the arena, so that late use is found.
constexpr size_t quarantine_limit = 1024;

uint64_t take_region(uint64_t mapped) {
    auto fits = state->reusable.lower_bound(mapped);
    if (fits != state->reusable.end() && fits->first < mapped + mapped / 4 + 1) {
        uint64_t offset = fits->second;
        state->reusable.erase(fits);
        return offset;
    }
    if (state->bump + mapped + red_zone > unbound_offset) return 0;
    uint64_t offset = state->bump;
    state->bump += mapped + red_zone;
    return offset;
}

Buffer* enter(uint64_t length, const Options& options) {
    initialise();
    uint64_t mapped = (std::max<uint64_t>(length, 1) + page - 1) / page * page;
    uint64_t offset = take_region(mapped);
    if (!offset) return nullptr;
    auto* b = new Buffer;
    b->length = length;
    b->arena_offset = offset;
    b->mapped = mapped;
    b->name = options.name;
    b->tracked = options.tracked;
    b->track_initialisation = options.track_initialisation;
    b->read_only = options.read_only;
    if (state->free_ids.empty()) {
        b->id = uint32_t(state->buffers.size());
        state->buffers.push_back(b);
    } else {
        b->id = state->free_ids.back();
        state->free_ids.pop_back();
        state->buffers[b->id] = b;
    }
    for (uint64_t p = 0; p < mapped / page; p++) state->page_owner[offset / page + p] = b->id;
    if (!b->read_only) state->allocated += length;  // setBytes blocks are no allocations of the host
    return b;
}

void recycle_oldest() {
    Region r = state->quarantine.front();
    state->quarantine.pop_front();
    uint32_t& first = state->page_owner[r.offset / page];
    Buffer* dead = state->buffers[first];
    state->buffers[first] = nullptr;
    state->free_ids.push_back(first);
    for (uint64_t p = 0; p < r.length / page; p++) state->page_owner[r.offset / page + p] = 0;
    state->reusable.emplace(r.length, r.offset);
    delete dead;
}

}  // namespace

void initialise() {
    if (state) return;
    state = new State;
    reserve(base, size, PROT_NONE);
    if (mprotect(address(threadgroup_offset), threadgroup_size, PROT_READ | PROT_WRITE)) abort();
    void* owners = mmap(nullptr, size / page * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (owners == MAP_FAILED) abort();
    state->page_owner = static_cast<uint32_t*>(owners);
    reserve(shadow::base, size * sizeof(shadow::Cell), PROT_READ | PROT_WRITE);
}

Buffer* allocate(uint64_t length, const Options& options) {
    Buffer* b = enter(length, options);
    if (!b) return nullptr;
    b->base = address(b->arena_offset);
    if (mprotect(b->base, b->mapped, PROT_READ | PROT_WRITE)) abort();
    // NaN bits: a read of memory that nobody wrote shows in results too.
    if (config().checks) memset(b->base, 0xFF, length);
    return b;
}

Buffer* adopt(void* memory, uint64_t length, const Options& options) {
    Buffer* b = enter(length, options);
    if (!b) return nullptr;
    b->base = static_cast<char*>(memory);
    b->host_memory = true;
    state->host[reinterpret_cast<uintptr_t>(memory)] = b;
    return b;
}

void release(Buffer* b) {
    b->live = false;
    if (!b->read_only) state->allocated -= b->length;
    if (b->host_memory) state->host.erase(reinterpret_cast<uintptr_t>(b->base));
    madvise(address(b->arena_offset), b->mapped, MADV_DONTNEED);
    mprotect(address(b->arena_offset), b->mapped, PROT_NONE);
    shadow::forget(b->arena_offset, b->mapped);
    state->quarantine.push_back({b->arena_offset, b->mapped});
    while (state->quarantine.size() > quarantine_limit ||
           (state->bump > unbound_offset / 2 && !state->quarantine.empty()))
        recycle_oldest();
}

Buffer* owner(uint64_t offset) { return state->buffers[state->page_owner[offset / page]]; }

Buffer* host_owner(uintptr_t a) {
    auto it = state->host.upper_bound(a);
    if (it == state->host.begin()) return nullptr;
    Buffer* b = std::prev(it)->second;
    return a < reinterpret_cast<uintptr_t>(b->base) + b->length ? b : nullptr;
}

std::vector<Buffer*> live_buffers() {
    std::vector<Buffer*> found;
    if (state)
        for (Buffer* b : state->buffers)
            if (b && b->live) found.push_back(b);
    return found;
}

uint64_t allocated_bytes() { return state ? state->allocated : 0; }

}  // namespace metalsim::arena
