// The Metal objects. Each holds references to what Metal's own objects hold.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "blocks.hpp"
#include "device.hpp"
#include "foundation.hpp"

namespace metalsim::objc {

struct Size {
    unsigned long width, height, depth;
};
Uint3 to_uint3(Size size, const char* what);

double now();  // seconds

struct Device : Object {};
Device* system_device();

struct MetalBuffer : Object {
    Buffer* buffer = nullptr;
    unsigned long options = 0;
    std::function<void()> deallocate;
    void finish();
};

struct CompileOptions : Object {
    metalsim::CompileOptions options;
    unsigned long math_mode = 2, max_threads = 0;
    bool fast_math = true;
};
struct FunctionConstants : Object {
    struct Named {
        std::string name;
        std::vector<char> value;
    };
    std::vector<ConstantValue> values;
    std::vector<Named> named;
};
struct MetalLibrary : Object {
    Library* library = nullptr;
};
struct Function : Object {
    Pipeline pipeline;
};
struct PipelineDescriptor : Object {
    Function* function = nullptr;
    unsigned long max_threads = 0;
    bool whole_simdgroups = false;
    void finish() { release(function); }
};
struct PipelineState : Object {
    Pipeline pipeline;
};

// ---- ordering between passes as the host sees it ----------------------------------------------------

// What the host knows to be complete: command buffers that it waited for, and events that it saw.
PassSet known_to_host();
void host_learns(const PassSet& passes);

struct Event : Object {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t value = 0;
    struct Signal {
        uint64_t value;
        PassSet passes;
    };
    std::vector<Signal> signals;
    struct Notification {
        uint64_t value;
        std::function<void()> call;
    };
    std::vector<Notification> notifications;

    void signal(uint64_t v, const PassSet& passes);
    // False on timeout; `passes` gets what the signal ordered before the wait.
    bool wait(uint64_t v, double seconds, PassSet& passes);
};
struct Fence : Object {
    PassSet passes;  // guarded by the device mutex
};
struct ResidencySet : Object {
    std::set<Object*> allocations, committed;
    void finish() {
        for (Object* o : allocations) release(o);
    }
};

// ---- commands --------------------------------------------------------------------------------------

struct CommandBuffer;
struct Queue : Object {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<CommandBuffer*> order;  // enqueued or committed, retained
    unsigned long limit = 64, in_flight = 0;
    bool quit = false;
    std::thread worker;
    void finish();
    void run();
};

enum Status : unsigned long { not_enqueued, enqueued, committed, scheduled, completed, failed };

struct CommandBuffer : Object {
    // What a step of the command buffer may find out.
    struct Failure {
        long code = 0;
        std::string message;
    };
    Queue* queue = nullptr;
    bool retains = true, encoder_open = false, counted = false;
    std::vector<std::function<Failure()>> steps;
    std::vector<Object*> kept;
    std::vector<Closure<CommandBuffer*>> scheduled_handlers, completed_handlers;
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<unsigned long> status{not_enqueued};
    bool handlers_done = false;
    Error* error = nullptr;
    double gpu_start = 0, gpu_end = 0;
    PassSet before, own;  // passes ordered before its next pass; its own passes

    void keep(Object* object) {
        if (retains) kept.push_back(retain(object));
    }
    PassSet all() const {
        PassSet s = before;
        s.merge(own);
        return s;
    }
    void execute();
    void finish();
};

// An encoder records; its commands run when the command buffer does.
struct CommandEncoder : Object {
    CommandBuffer* command_buffer = nullptr;
    bool ended = false, concurrent = false;
    PipelineState* pipeline = nullptr;
    std::vector<std::function<void(Encoder&)>> commands;
    std::vector<Fence*> updated_fences;
    void end();
    void finish();
};
CommandEncoder* new_encoder(CommandBuffer* buffer, const char* cls, bool concurrent);

}  // namespace metalsim::objc
