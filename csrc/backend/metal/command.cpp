#include "backend/metal/command.h"

#include <Metal/Metal.hpp>
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "backend/metal/autorelease.h"
#include "backend/metal/submission.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr size_t kBindings = 31;
constexpr size_t kLargestConstant = 4096;
constexpr uint64_t kMultiplyAddsPerByte = 16;  // that GPUs do in the time of a byte

bool is_read(Access access) { return access == Access::read || access == Access::read_write; }
bool is_written(Access access) { return access == Access::write || access == Access::read_write; }

MTL::Size to_size(Extent extent) { return MTL::Size(extent.x, extent.y, extent.z); }

}  // namespace

StreamOptions StreamOptions::from_environment() {
    StreamOptions options;
    const char* serial = std::getenv("LILY_METAL_SERIAL");
    options.serial = serial && std::string_view(serial) == "1";
    return options;
}

bool Completion::done() const { return submission_->done(); }

void Completion::wait() const {
    submission_->wait();
    submission_->report();
}

double Completion::gpu_start() const { return submission_->gpu_start(); }
double Completion::gpu_end() const { return submission_->gpu_end(); }
double Completion::gpu_seconds() const { return gpu_end() - gpu_start(); }

CommandStream::CommandStream(Device& device, StreamOptions options)
    : device_(device), options_(options), failures_(std::make_shared<Failures>()) {
    const AutoreleaseScope scope;
    queue_ = NS::TransferPtr(device.handle()->newCommandQueue());
    if (!queue_) throw BackendError("Metal made no command queue on " + device.name());
    fence_ = NS::TransferPtr(device.handle()->newFence());
    if (!fence_) throw BackendError("Metal made no fence on " + device.name());
    if (device.residency()) queue_->addResidencySet(device.residency());
}

CommandStream::~CommandStream() { wait_idle(); }

Pass CommandStream::begin(std::string_view label) {
    if (pass_open_) throw BackendError("a Metal pass is begun while another is open");
    if (const std::string reason = broken(); !reason.empty()) {
        throw BackendError("the GPU can't be used any more; start the process again: " + reason);
    }
    device_.make_resident();
    return Pass(*this, label);
}

void CommandStream::wait_idle() {
    for (const auto& submission : in_flight_) submission->wait();
    in_flight_.clear();
}

std::string CommandStream::broken() const { return failures_->broken(); }

void CommandStream::admit(const std::shared_ptr<Submission>& submission) {
    while (in_flight_.size() >= options_.in_flight) {
        in_flight_.front()->wait();
        in_flight_.pop_front();
    }
    submission->follow(last_);
    last_ = submission;
    in_flight_.push_back(submission);
}

Pass::Pass(CommandStream& stream, std::string_view label)
    : stream_(stream),
      pool_(NS::TransferPtr(NS::AutoreleasePool::alloc()->init())),
      submission_(std::make_shared<Submission>(std::string(label), ++stream.passes_, stream.failures_)),
      bound_(kBindings) {
    stream_.pass_open_ = true;
}

Pass::~Pass() {
    if (encoder_) encoder_->endEncoding();
    encoder_.reset();
    command_buffer_.reset();
    pool_.reset();
    stream_.pass_open_ = false;
}

void Pass::open_command_buffer() {
    command_buffer_ = NS::RetainPtr(stream_.queue_->commandBuffer());
    if (!command_buffer_) throw BackendError("Metal made no command buffer");
    command_buffer_->setLabel(to_ns(submission_->label()));
    const auto order = stream_.options_.serial ? MTL::DispatchTypeSerial : MTL::DispatchTypeConcurrent;
    encoder_ = NS::RetainPtr(command_buffer_->computeCommandEncoder(order));
    if (!encoder_) throw BackendError("Metal made no compute encoder");
    encoder_->setLabel(to_ns(submission_->label()));
    if (stream_.fence_updated_) encoder_->waitForFence(stream_.fence_.get());
    std::ranges::fill(bound_, Bound{});
    kernel_ = nullptr;
    work_ = 0;
    stage_open_ = false;
    read_.clear();
    written_.clear();
}

void Pass::close_command_buffer() {
    encoder_->updateFence(stream_.fence_.get());
    encoder_->endEncoding();
    encoder_.reset();
    if (!committed_) stream_.admit(submission_);
    committed_ = true;
    submission_->add(command_buffer_);
    command_buffer_->commit();
    command_buffer_.reset();
    stream_.fence_updated_ = true;
    ++stream_.counts_.command_buffers;
}

void Pass::check(const Kernel& kernel, std::span<const Argument> arguments, Extent groups,
                 Extent threads) const {
    const auto refuse = [&](const std::string& reason) {
        throw BackendError("launch of Metal kernel '" + kernel.name() + "': " + reason);
    };
    if (!pool_) refuse("the pass is already committed");
    if (groups.count() == 0 || threads.count() == 0) refuse("it has no threads");
    if (threads.count() > kernel.max_threads()) {
        refuse(std::to_string(threads.count()) + " threads in a threadgroup, its pipeline allows " +
               std::to_string(kernel.max_threads()) + " on " + stream_.device_.name());
    }
    if (arguments.size() > kBindings) refuse("more than 31 arguments");
    const std::span<const Binding> bindings = kernel.bindings();
    for (size_t i = arguments.size(); i < bindings.size(); ++i) {
        if (bindings[i].used) refuse("argument " + std::to_string(i) + " is missing");
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
        const Argument& argument = arguments[i];
        const auto wrong = [&](const std::string& reason) {
            refuse("argument " + std::to_string(i) + reason);
        };
        if (argument.access == Access::constant) {
            if (argument.bytes > kLargestConstant) wrong(" is larger than 4 KiB");
        } else if (!argument.buffer || !*argument.buffer) {
            wrong(" has no buffer");
        } else if (argument.offset > argument.buffer->size() ||
                   argument.bytes > argument.buffer->size() - argument.offset) {
            wrong(" reaches beyond the buffer '" + argument.buffer->label() + "'");
        }
        if (i < bindings.size() && bindings[i].written && !is_written(argument.access) &&
            argument.bytes > 0) {
            wrong(" is declared as read, but the kernel may write it");
        }
    }
}

bool Pass::depends(std::span<const Argument> arguments) const {
    const auto overlaps = [](const Argument& argument, const std::vector<Touched>& touched) {
        return std::ranges::any_of(touched, [&](const Touched& t) {
            return t.buffer == argument.buffer->handle() && t.begin < argument.offset + argument.bytes &&
                   argument.offset < t.end;
        });
    };
    return std::ranges::any_of(arguments, [&](const Argument& argument) {
        if (argument.access == Access::constant) return false;
        return overlaps(argument, written_) || (is_written(argument.access) && overlaps(argument, read_));
    });
}

void Pass::bind(std::span<const Argument> arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
        const Argument& argument = arguments[i];
        if (argument.access == Access::constant) {
            encoder_->setBytes(argument.value, argument.bytes, i);
            bound_[i] = {};
            continue;
        }
        const MTL::Buffer* buffer = argument.buffer->handle();
        if (bound_[i].buffer != buffer) {
            encoder_->setBuffer(buffer, argument.offset, i);
        } else if (bound_[i].offset != argument.offset) {
            encoder_->setBufferOffset(argument.offset, i);
        }
        bound_[i] = {buffer, argument.offset};
    }
}

void Pass::launch(const Kernel& kernel, std::span<const Argument> arguments, Extent groups, Extent threads,
                  Work work) {
    check(kernel, arguments, groups, threads);
    uint64_t bytes_read = 0, bytes_written = 0;
    for (const Argument& argument : arguments) {
        bytes_read += is_read(argument.access) ? argument.bytes : 0;
        bytes_written += is_written(argument.access) ? argument.bytes : 0;
    }
    if (work.read == 0) work.read = bytes_read;
    if (work.written == 0) work.written = bytes_written;
    const uint64_t load = work.read + work.written + work.multiply_adds / kMultiplyAddsPerByte;
    if (encoder_ && work_ > 0 && work_ + load > stream_.options_.command_buffer_bytes) close_command_buffer();
    if (!encoder_) open_command_buffer();

    Counts& counts = stream_.counts_;
    if (stream_.options_.serial) {
        stage_open_ = false;
    } else if (depends(arguments)) {
        encoder_->memoryBarrier(MTL::BarrierScopeBuffers);
        read_.clear();
        written_.clear();
        stage_open_ = false;
        ++counts.barriers;
    }
    if (kernel_ != &kernel) encoder_->setComputePipelineState(kernel.handle());
    kernel_ = &kernel;
    bind(arguments);
    encoder_->dispatchThreadgroups(to_size(groups), to_size(threads));

    for (const Argument& argument : arguments) {
        if (argument.access == Access::constant || argument.bytes == 0) continue;
        const Touched touched{argument.buffer->handle(), argument.offset, argument.offset + argument.bytes};
        if (is_written(argument.access)) {
            written_.push_back(touched);
        } else {
            read_.push_back(touched);
        }
    }
    submission_->add(kernel);
    work_ += load;
    ++counts.launches;
    counts.stages += stage_open_ ? 0 : 1;
    stage_open_ = true;
    counts.bytes_read += work.read;
    counts.bytes_written += work.written;
    counts.multiply_adds += work.multiply_adds;
}

Completion Pass::commit() {
    if (!pool_) throw BackendError("the Metal pass '" + submission_->label() + "' is already committed");
    if (encoder_) close_command_buffer();
    pool_.reset();
    stream_.pass_open_ = false;
    ++stream_.counts_.passes;
    return Completion(submission_);
}

}  // namespace lily::metal
