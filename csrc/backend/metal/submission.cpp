#include "backend/metal/submission.h"

#include <Metal/Metal.hpp>
#include <algorithm>

#include "backend/metal/autorelease.h"
#include "backend/metal/kernel_library.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr size_t kNamedKernels = 4;  // at each end of a list

// What a code of MTLCommandBufferErrorDomain means to the caller.
const char* meaning(NS::Integer code) {
    switch (code) {
        case MTL::CommandBufferErrorTimeout:
            return "the GPU worked on it longer than the system allows";
        case MTL::CommandBufferErrorPageFault:
            return "a kernel touched memory outside of its buffers";
        case MTL::CommandBufferErrorAccessRevoked:
            return "the system takes no more work from this process";
        case MTL::CommandBufferErrorNotPermitted:
            return "the system doesn't permit GPU work here";
        case MTL::CommandBufferErrorOutOfMemory:
            return "the GPU ran out of memory";
        case MTL::CommandBufferErrorDeviceRemoved:
            return "the GPU is gone";
        default:
            return "the GPU failed";
    }
}

// Whether later command buffers will fare no better.
bool is_final(NS::Integer code) {
    return code == MTL::CommandBufferErrorAccessRevoked || code == MTL::CommandBufferErrorNotPermitted ||
           code == MTL::CommandBufferErrorDeviceRemoved;
}

}  // namespace

void Failures::report(uint64_t pass) {
    uint64_t known = reported_.load();
    while (known < pass && !reported_.compare_exchange_weak(known, pass)) {
    }
}

void Failures::break_stream(std::string reason) {
    const std::lock_guard lock(mutex_);
    broken_ = std::move(reason);
}

std::string Failures::broken() const {
    const std::lock_guard lock(mutex_);
    return broken_;
}

Submission::~Submission() = default;

void Submission::add(Owned<MTL::CommandBuffer> command_buffer) {
    const std::lock_guard lock(mutex_);
    parts_.push_back({std::move(command_buffer), kernels_.size()});
}

void Submission::follow(std::shared_ptr<Submission> previous) {
    const std::lock_guard lock(mutex_);
    previous_ = std::move(previous);
    reported_ = failures_->reported();
}

bool Submission::done() {
    const AutoreleaseScope scope;
    const std::lock_guard lock(mutex_);
    return concluded_ || std::ranges::all_of(parts_, [](const Part& part) {
               return part.command_buffer->status() >= MTL::CommandBufferStatusCompleted;
           });
}

void Submission::wait() {
    const AutoreleaseScope scope;
    const std::lock_guard lock(mutex_);
    if (concluded_) return;
    if (previous_) previous_->wait();
    for (const Part& part : parts_) part.command_buffer->waitUntilCompleted();
    conclude();
}

void Submission::conclude() {
    for (size_t i = 0; i < parts_.size() && failed_pass_ == 0; ++i) {
        const MTL::CommandBuffer* buffer = parts_[i].command_buffer.get();
        if (buffer->status() == MTL::CommandBufferStatusCompleted) continue;
        const NS::Error* error = buffer->error();
        const NS::Integer code = error ? error->code() : 0;
        failed_pass_ = pass_;
        cause_ = describe(i) + " failed: " + meaning(code) + ": " + reason_of(error) + " (code " +
                 std::to_string(code) + ")";
        if (is_final(code)) failures_->break_stream(cause_);
    }
    if (failed_pass_ == 0 && previous_ && previous_->failed_pass_ > reported_) {
        failed_pass_ = previous_->failed_pass_;
        cause_ = previous_->cause_;
    }
    if (!parts_.empty()) {
        gpu_start_ = parts_.front().command_buffer->GPUStartTime();
        gpu_end_ = parts_.back().command_buffer->GPUEndTime();
    }
    parts_.clear();
    kernels_.clear();
    previous_.reset();
    concluded_ = true;
}

std::string Submission::describe(size_t part) const {
    const size_t begin = part == 0 ? 0 : parts_[part - 1].kernels, end = parts_[part].kernels;
    std::string text = "Metal pass '" + label_ + "', " + std::to_string(end - begin) + " launches (";
    for (size_t i = begin; i < end; ++i) {
        if (i >= begin + kNamedKernels && i + kNamedKernels < end) {
            if (i == begin + kNamedKernels) text += ", ...";
            continue;
        }
        text += (i == begin ? "" : ", ") + kernels_[i]->name();
    }
    return text + ")";
}

void Submission::report() {
    const std::lock_guard lock(mutex_);
    if (failed_pass_ == 0) return;
    failures_->report(failed_pass_);
    if (failed_pass_ == pass_) throw BackendError(cause_);
    throw BackendError("Metal pass '" + label_ +
                       "' has no valid result, for an earlier one failed: " + cause_);
}

}  // namespace lily::metal
