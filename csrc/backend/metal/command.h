// Launches of kernels: encoded into command buffers, ordered where one needs another's result, and awaited.
//
//     CommandStream stream(device);
//     Pass pass = stream.begin("decode");
//     pass.launch(kernel, {reads(weights), reads(x), writes(y), constant(shape)}, {groups}, {256});
//     Completion done = pass.commit();  // the next pass can be encoded while this one runs
//     done.wait();                      // BackendError if the GPU failed
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/metal/device.h"
#include "backend/metal/kernel_library.h"

namespace MTL {
class CommandBuffer;
class CommandQueue;
class ComputeCommandEncoder;
class Fence;
}  // namespace MTL

namespace NS {
class AutoreleasePool;
}

namespace lily::metal {

// Bytes [offset, offset + bytes) of a buffer.
struct Range {
    Range(const DeviceBuffer& buffer) : buffer(&buffer), offset(0), bytes(buffer.size()) {}
    Range(const DeviceBuffer& buffer, size_t offset, size_t bytes)
        : buffer(&buffer), offset(offset), bytes(bytes) {}
    const DeviceBuffer* buffer;
    size_t offset, bytes;
};

enum class Access : uint8_t { read, write, read_write, constant };

// What is bound at one [[buffer(i)]], and what the kernel does with it. A range is a promise: the launch
// touches nothing outside of it. Order between launches follows from these alone.
struct Argument {
    Access access;
    const DeviceBuffer* buffer = nullptr;
    size_t offset = 0, bytes = 0;
    const void* value = nullptr;  // of a constant, until launch() returns
};

inline Argument reads(const Range& r) { return {Access::read, r.buffer, r.offset, r.bytes}; }
inline Argument writes(const Range& r) { return {Access::write, r.buffer, r.offset, r.bytes}; }
inline Argument updates(const Range& r) { return {Access::read_write, r.buffer, r.offset, r.bytes}; }
// Bound because something has to be: the kernel doesn't touch it.
inline Argument unused(const DeviceBuffer& buffer) { return {Access::read, &buffer, 0, 0}; }
// A parameter structure or scalar, at most 4 KiB, copied by launch().
template <typename T>
Argument constant(const T& value) {
    return {Access::constant, nullptr, 0, sizeof(T), &value};
}

struct Extent {
    uint32_t x, y = 1, z = 1;
    uint64_t count() const { return uint64_t{x} * y * z; }
};

// What a stream has encoded.
struct Counts {
    uint64_t passes = 0, command_buffers = 0, launches = 0, barriers = 0;
    uint64_t stages = 0;  // groups of launches that nothing orders among themselves
    uint64_t bytes_read = 0, bytes_written = 0, multiply_adds = 0;  // the sums of Work
};

// What a launch costs, by its own estimate.
struct Work {
    uint64_t read = 0;     // bytes; 0 takes the declared ranges, of all experts instead of the chosen ones
    uint64_t written = 0;  // the same
    uint64_t multiply_adds = 0;  // of matrices, if there are many rows
};

struct StreamOptions {
    bool serial = false;  // every launch waits for the one before; LILY_METAL_SERIAL=1
    uint64_t command_buffer_bytes = uint64_t{4} << 30;  // more goes into the next one: the system's watchdog
    size_t in_flight = 2;                               // passes on the GPU before commit() waits
    static StreamOptions from_environment();            // LILY_METAL_SERIAL
};

class Submission;
class Failures;

// A committed pass.
class Completion {
  public:
    Completion() = default;
    explicit Completion(std::shared_ptr<Submission> submission) : submission_(std::move(submission)) {}
    explicit operator bool() const { return submission_ != nullptr; }
    bool done() const;
    // Until the GPU is done; then the host may read what the pass wrote. BackendError names the pass, its
    // kernels and the reason if it failed, or if an earlier pass failed after which this one was already
    // committed.
    void wait() const;
    // After wait(): seconds the GPU spent, from the first command buffer's start to the last one's end.
    double gpu_seconds() const;
    double gpu_start() const;
    double gpu_end() const;

  private:
    std::shared_ptr<Submission> submission_;
};

class CommandStream;

// A pass being encoded, on one thread, as a local variable. Without commit() it doesn't happen, except for
// command buffers that were full.
class Pass {
  public:
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

    // Arguments by [[buffer(i)]]. `work` is for the size of command buffers. BackendError: too many threads
    // for the pipeline, a range outside of its buffer.
    void launch(const Kernel& kernel, std::span<const Argument> arguments, Extent groups, Extent threads,
                Work work = {});
    void launch(const Kernel& kernel, std::initializer_list<Argument> arguments, Extent groups,
                Extent threads, Work work = {}) {
        launch(kernel, std::span(arguments.begin(), arguments.size()), groups, threads, work);
    }
    // Hands the pass to the GPU; waits while `in_flight` earlier ones run. Nothing can be added afterwards.
    Completion commit();

  private:
    friend class CommandStream;
    Pass(CommandStream& stream, std::string_view label);

    struct Touched {
        const MTL::Buffer* buffer;
        size_t begin, end;
    };
    struct Bound {
        const MTL::Buffer* buffer = nullptr;
        size_t offset = 0;
    };

    void open_command_buffer();
    void close_command_buffer();
    void check(const Kernel& kernel, std::span<const Argument> arguments, Extent groups,
               Extent threads) const;
    bool depends(std::span<const Argument> arguments) const;
    void bind(std::span<const Argument> arguments);

    CommandStream& stream_;
    Owned<NS::AutoreleasePool> pool_;
    std::shared_ptr<Submission> submission_;
    Owned<MTL::CommandBuffer> command_buffer_;
    Owned<MTL::ComputeCommandEncoder> encoder_;
    std::vector<Touched> read_, written_;  // since the last barrier
    std::vector<Bound> bound_;
    const Kernel* kernel_ = nullptr;  // set in the encoder
    uint64_t work_ = 0;               // of the command buffer
    bool stage_open_ = false;
    bool committed_ = false;
};

// A queue of passes; they run in the order of their commits. One thread at a time.
class CommandStream {
  public:
    explicit CommandStream(Device& device, StreamOptions options = StreamOptions::from_environment());
    ~CommandStream();  // waits for the GPU
    CommandStream(const CommandStream&) = delete;
    CommandStream& operator=(const CommandStream&) = delete;

    // One pass at a time. BackendError after a failure that the GPU doesn't recover from.
    Pass begin(std::string_view label);
    // Until everything committed is done; throws nothing, Completions keep their failures.
    void wait_idle();
    // Why nothing can be run any more, or "".
    std::string broken() const;

    const Counts& counts() const { return counts_; }
    void reset_counts() { counts_ = {}; }

  private:
    friend class Pass;
    void admit(const std::shared_ptr<Submission>& submission);  // waits until it may be in flight

    Device& device_;
    StreamOptions options_;
    Owned<MTL::CommandQueue> queue_;
    Owned<MTL::Fence> fence_;  // orders passes: buffers are untracked
    bool fence_updated_ = false;
    bool pass_open_ = false;
    uint64_t passes_ = 0;  // ever begun
    std::shared_ptr<Failures> failures_;
    std::shared_ptr<Submission> last_;
    std::deque<std::shared_ptr<Submission>> in_flight_;
    Counts counts_;
};

}  // namespace lily::metal
