// The software device: one compute encoder at a time turns bindings and dispatches into fiber runs.
#pragma once
#include <array>
#include <mutex>
#include <vector>

#include "arena.hpp"
#include "library.hpp"
#include "ordering.hpp"

namespace metalsim {

// Held while anything of the device runs or changes; buffers are made and released under it too.
std::recursive_mutex& device_mutex();

class Encoder {
  public:
    // Starts a pass. `after` = passes ordered before it for untracked buffers.
    explicit Encoder(bool concurrent, const PassSet& after = {});
    ~Encoder();
    Encoder(const Encoder&) = delete;
    Encoder& operator=(const Encoder&) = delete;

    uint64_t pass() const { return pass_; }
    void set_pipeline(const Pipeline& pipeline) { pipeline_ = &pipeline; }
    void set_buffer(Buffer* buffer, uint64_t offset, unsigned index);  // nullptr unbinds
    void set_offset(uint64_t offset, unsigned index);
    void set_bytes(const void* bytes, size_t length, unsigned index);
    void set_threadgroup_memory(uint32_t length, unsigned index) {
        arguments_.threadgroup_length[index] = length;
    }
    void use(Buffer* buffer) { used_.push_back(buffer); }
    void barrier();
    void barrier(const std::vector<Buffer*>& buffers);
    // False if the dispatch was refused or abandoned; the reason is a diagnostic.
    bool dispatch_threads(Uint3 threads, Uint3 group);
    bool dispatch_threadgroups(Uint3 groups, Uint3 group);
    // Group counts are three 32-bit integers in `buffer`.
    bool dispatch_indirect(Buffer& buffer, uint64_t offset, Uint3 group);
    void copy(Buffer& from, uint64_t from_offset, Buffer& to, uint64_t to_offset, uint64_t length);
    void fill(Buffer& buffer, uint64_t offset, uint64_t length, uint8_t value);

  private:
    bool dispatch(Uint3 threads, Uint3 group, Uint3 groups, bool trim_edges);
    bool arguments_are_valid(Uint3 group, Uint3 groups);
    void mark_bound_buffers();

    uint64_t pass_;
    const Pipeline* pipeline_ = nullptr;
    Arguments arguments_;
    std::array<Buffer*, max_bindings> bound_{};
    std::vector<Buffer*> used_;
    std::vector<Buffer*> constants_;  // setBytes blocks, released with the encoder
};

}  // namespace metalsim
