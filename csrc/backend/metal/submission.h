// A pass that was handed to the GPU, and what became of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/metal/owned.h"

namespace MTL {
class CommandBuffer;
}

namespace lily::metal {

class Kernel;

// Failures of a stream that its caller knows of. Passes are told apart by their number, from 1.
class Failures {
  public:
    uint64_t reported() const { return reported_.load(); }
    void report(uint64_t pass);
    void break_stream(std::string reason);
    std::string broken() const;

  private:
    std::atomic<uint64_t> reported_{0};
    mutable std::mutex mutex_;
    std::string broken_;
};

// A pass whose predecessor failed has computed with what that left behind: it fails too, unless it was
// committed after the caller had been told.
class Submission {
  public:
    Submission(std::string label, uint64_t pass, std::shared_ptr<Failures> failures)
        : label_(std::move(label)), pass_(pass), failures_(std::move(failures)) {}
    ~Submission();

    const std::string& label() const { return label_; }
    // While it is encoded.
    void add(const Kernel& kernel) { kernels_.push_back(&kernel); }
    void add(Owned<MTL::CommandBuffer> command_buffer);
    // Before its first command buffer is committed.
    void follow(std::shared_ptr<Submission> previous);

    bool done();
    void wait();    // until its outcome is known
    void report();  // after wait(): throws BackendError if it failed
    double gpu_start() const { return gpu_start_; }
    double gpu_end() const { return gpu_end_; }

  private:
    struct Part {
        Owned<MTL::CommandBuffer> command_buffer;
        size_t kernels;  // of the pass up to its end
    };
    void conclude();
    std::string describe(size_t part) const;

    std::string label_;
    uint64_t pass_;
    std::shared_ptr<Failures> failures_;
    std::vector<const Kernel*> kernels_;

    std::mutex mutex_;
    std::vector<Part> parts_;  // until the outcome is known
    std::shared_ptr<Submission> previous_;
    uint64_t reported_ = 0;  // failures known to the caller when it was committed
    bool concluded_ = false;
    uint64_t failed_pass_ = 0;  // the pass that is to blame; 0 if all went well
    std::string cause_;         // its failure
    double gpu_start_ = 0, gpu_end_ = 0;
};

}  // namespace lily::metal
