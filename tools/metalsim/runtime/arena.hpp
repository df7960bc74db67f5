// The address range in which every buffer lives, page by page with red zones, and the buffers themselves.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace metalsim {

struct Buffer {
    char* base = nullptr;  // what contents() returns
    uint64_t length = 0;
    uint64_t arena_offset =
        0;                // its place in the arena; for host memory a place without pages, for the shadow
    uint64_t mapped = 0;  // bytes of the arena it occupies, without the red zone
    uint32_t id = 0;
    std::string name;
    bool live = true;
    bool read_only = false;
    bool tracked = true;  // the GPU orders command encoders that use it
    bool track_initialisation = false;
    bool written = false;         // by the GPU, in this generation of dispatches or before
    bool host_memory = false;     // newBufferWithBytesNoCopy
    uint64_t bound_dispatch = 0;  // dispatch that binds it, and the lowest offset bound
    uint64_t lowest_offset = 0;
    uint64_t barrier_pass = 0;  // memoryBarrierWithResources: pass and last dispatch that it covers
    uint32_t barrier_dispatch = 0;
};

namespace arena {

constexpr uintptr_t base = 0x200000000000;
constexpr uint64_t size = 64ull << 30;
constexpr uint64_t page = 4096;
constexpr uint64_t red_zone = 16 * page;
constexpr uint64_t threadgroup_offset = 60ull << 30;  // threadgroup memory is here
constexpr uint64_t threadgroup_size = 8ull << 20;
// Unbound buffer arguments point into the middle of a range that holds nothing.
constexpr uint64_t unbound_offset = 56ull << 30, unbound_size = 4ull << 30;

// Reserves the address ranges, once.
void initialise();

struct Options {
    const char* name = "buffer";
    bool tracked = true;
    bool track_initialisation = false;
    bool read_only = false;
};
// nullptr when the arena is full.
Buffer* allocate(uint64_t length, const Options& options);
// A buffer over memory of the host.
Buffer* adopt(void* memory, uint64_t length, const Options& options);
void release(Buffer* buffer);

// Owner of an arena offset, or nullptr in a red zone.
Buffer* owner(uint64_t offset);
// The adopted buffer that holds a host address, or nullptr.
Buffer* host_owner(uintptr_t address);
std::vector<Buffer*> live_buffers();
uint64_t allocated_bytes();

}  // namespace arena
}  // namespace metalsim
