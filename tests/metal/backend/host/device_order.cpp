// Order within a pass, across passes and across command buffers, and what is counted.
#include <cstdlib>

#include "device_fixture.hpp"

namespace {

void one_pass(Gpu& gpu) {
    auto x = gpu.floats(1), y = gpu.floats(2), z = gpu.floats(0), w = gpu.floats(0);
    const auto run = [&](const std::function<void(metal::Pass&)>& encode) {
        gpu.stream.reset_counts();
        metal::Pass pass = gpu.stream.begin("test");
        encode(pass);
        pass.commit().wait();
        return gpu.stream.counts();
    };
    metal::Counts counts = run([&](metal::Pass& pass) {
        gpu.launch_add(pass, x, y, z);
        gpu.launch_add(pass, z, y, w);
    });
    check(all(z, 3) && all(w, 5), "a launch sees the result of the one before");
    check(counts.barriers == 1 && counts.launches == 2 && counts.stages == 2, "by one barrier");
    check(counts.bytes_read == 4 * 256 && counts.bytes_written == 2 * 256, "declared bytes are counted");
    check(counts.passes == 1 && counts.command_buffers == 1, "in one command buffer");

    counts = run([&](metal::Pass& pass) {
        gpu.launch_add(pass, x, y, z);
        gpu.launch_add(pass, y, y, w);
    });
    check(counts.barriers == 0 && counts.stages == 1, "launches that share only inputs need no barrier");

    counts = run([&](metal::Pass& pass) {
        gpu.launch_add(pass, x, y, z);
        gpu.launch_advance(pass, x);
    });
    check(counts.barriers == 1 && all(z, 3) && all(x, 2), "a write waits for the reads before it");
    counts = run([&](metal::Pass& pass) {
        gpu.launch_add(pass, x, x, z);
        gpu.launch_add(pass, y, y, z);
    });
    check(counts.barriers == 1 && all(z, 4), "a write waits for the write before it");

    counts = run([&](metal::Pass& pass) {
        gpu.launch_add(pass, x, y, z);
        gpu.launch_advance(pass, z);
        gpu.launch_add(pass, y, y, w);
        gpu.launch_advance(pass, y);
    });
    check(counts.barriers == 2 && counts.stages == 3 && counts.launches == 4,
          "what a barrier ordered needs no other one");
    check(all(z, 5) && all(w, 4) && all(y, 3), "and the results are right");

    auto halves = gpu.floats(1, 2 * kCount);
    const metal::Range low(halves, 0, 256), high(halves, 256, 256), middle(halves, 252, 256);
    counts = run([&](metal::Pass& pass) {
        gpu.launch_advance(pass, low);
        gpu.launch_advance(pass, high);
    });
    check(counts.barriers == 0 && all(halves, 2), "ranges that only touch each other's ends need no barrier");
    counts = run([&](metal::Pass& pass) {
        gpu.launch_advance(pass, low);
        gpu.launch_advance(pass, middle);
    });
    check(counts.barriers == 1, "ranges that overlap by one element do");
    check(metalsim_diagnostic_count() == 0, "the checker found every order right");
}

void wrong_declarations(Gpu& gpu) {
    auto x = gpu.floats(1), y = gpu.floats(1);
    const auto failure = [&](const std::function<void(metal::Pass&)>& encode) {
        metal::Pass pass = gpu.stream.begin("wrong");
        encode(pass);
        const metal::Completion done = pass.commit();
        const std::string error = error_of([&] { done.wait(); });
        metalsim_diagnostics_clear();
        return error;
    };
    std::string error = failure([&](metal::Pass& pass) {
        pass.launch(gpu.advance, {unused(x), constant(kCount)}, {2}, {32});
        gpu.launch_add(pass, x, x, y);
    });
    check(contains(error, "dispatch-hazard"), "a write declared as none is found: " + error);
    check(contains(error, "Metal pass 'wrong', 2 launches (advance, add)"),
          "the error names pass and kernels");
    error = failure([&](metal::Pass& pass) {
        pass.launch(gpu.advance, {updates({x, 0, 128}), constant(kCount)}, {2}, {32});
        gpu.launch_advance(pass, {x, 128, 128});
    });
    check(contains(error, "dispatch-hazard"), "so is a range that is too short");
    error = failure([&](metal::Pass& pass) {
        pass.launch(gpu.add, {unused(x), reads(y), writes(y), constant(kCount)}, {2}, {32});
        gpu.launch_advance(pass, x);
    });
    check(contains(error, "dispatch-hazard"), "and a buffer that is used after all");
    metal::Pass pass = gpu.stream.begin("right");
    gpu.launch_advance(pass, x);
    check(error_of([&] { pass.commit().wait(); }).empty(), "the stream works on");
}

void passes(Gpu& gpu) {
    auto x = gpu.floats(0);
    std::vector<metal::Completion> done;
    for (int i = 0; i < 5; ++i) {
        metal::Pass pass = gpu.stream.begin("chain");
        gpu.launch_advance(pass, x);
        done.push_back(pass.commit());
    }
    for (const metal::Completion& completion : done) completion.wait();
    check(all(x, 5) && metalsim_diagnostic_count() == 0, "passes run in order without the host");
    check(done[0].gpu_seconds() > 0 && done[0].gpu_end() <= done[1].gpu_start(), "their GPU times are known");

    const metal::Completion empty = gpu.stream.begin("empty").commit();
    empty.wait();
    check(empty.done(), "a pass without launches is done");
    {
        metal::Pass dropped = gpu.stream.begin("dropped");
        gpu.launch_advance(dropped, x);
        const std::string error = error_of([&] { gpu.stream.begin("second"); });
        check(contains(error, "while another is open"), "one pass is encoded at a time");
    }
    metal::Pass pass = gpu.stream.begin("after");
    gpu.launch_advance(pass, x);
    pass.commit().wait();
    check(all(x, 6), "a pass that is not committed never happened");
    check(contains(error_of([&] { gpu.launch_advance(pass, x); }), "already committed") &&
              contains(error_of([&] { pass.commit(); }), "already committed"),
          "a committed pass takes nothing more");
}

void full_command_buffers() {
    Gpu gpu({.command_buffer_bytes = 1000});
    auto x = gpu.floats(0), y = gpu.floats(0);
    metal::Pass pass = gpu.stream.begin("long");
    for (int i = 0; i < 5; ++i) gpu.launch_advance(pass, x);  // 512 bytes each
    gpu.launch_add(pass, x, x, y);
    const metal::Completion done = pass.commit();
    done.wait();
    const metal::Counts counts = gpu.stream.counts();
    check(counts.command_buffers == 6 && counts.passes == 1, "a full command buffer is followed by another");
    check(counts.barriers == 0 && counts.stages == 6, "which needs no barrier at its beginning");
    check(all(y, 10) && metalsim_diagnostic_count() == 0, "and keeps the order");

    gpu.stream.reset_counts();
    metal::Pass light = gpu.stream.begin("estimated");
    const metal::Work work{.read = 50, .written = 50};
    for (int i = 0; i < 5; ++i) light.launch(gpu.advance, {updates(x), constant(kCount)}, {2}, {32}, work);
    light.commit().wait();
    check(gpu.stream.counts().command_buffers == 1, "an estimate of the work takes the place of the ranges");
}

void in_flight(Gpu& gpu) {
    auto x = gpu.floats(0), y = gpu.floats(0), z = gpu.floats(0);
    metalsim_fault("timeout", 1, 2, 1);  // the first takes a while
    std::vector<metal::Completion> done;
    for (const metal::DeviceBuffer* buffer : {&x, &y}) {
        metal::Pass pass = gpu.stream.begin("flight");
        gpu.launch_advance(pass, *buffer);
        done.push_back(pass.commit());
    }
    check(!done[0].done(), "two passes are in flight at once");
    metal::Pass pass = gpu.stream.begin("flight");
    gpu.launch_advance(pass, z);
    done.push_back(pass.commit());
    check(done[0].done(), "the third waits until the first is done");
    gpu.stream.wait_idle();
    check(done[2].done(), "the stream can be awaited as a whole");
    check(contains(error_of([&] { done[2].wait(); }), "GPU worked on it longer"),
          "which throws nothing itself");
}

void serial() {
    setenv("LILY_METAL_SERIAL", "1", 1);
    Gpu gpu(metal::StreamOptions::from_environment());
    unsetenv("LILY_METAL_SERIAL");
    auto x = gpu.floats(1), y = gpu.floats(0);
    metal::Pass pass = gpu.stream.begin("serial");
    pass.launch(gpu.advance, {unused(x), constant(kCount)}, {2}, {32});  // wrong, and without consequence
    gpu.launch_add(pass, x, x, y);
    gpu.launch_add(pass, x, x, y);
    pass.commit().wait();
    check(all(y, 4) && metalsim_diagnostic_count() == 0, "LILY_METAL_SERIAL=1 orders every launch");
    check(gpu.stream.counts().stages == 3 && gpu.stream.counts().barriers == 0, "without barriers");
    check(!metal::StreamOptions::from_environment().serial, "it is off by default");
}

void refusals(Gpu& gpu) {
    auto x = gpu.floats(0);
    metal::Pass pass = gpu.stream.begin("refused");
    const auto refused = [&](std::initializer_list<metal::Argument> arguments, metal::Extent groups,
                             metal::Extent threads) {
        return error_of([&] { pass.launch(gpu.advance, arguments, groups, threads); });
    };
    struct Large {
        char bytes[4100];
    };
    check(
        contains(refused({updates({x, 0, 260}), constant(kCount)}, {1}, {32}), "beyond the buffer 'floats'"),
        "a range beyond its buffer is refused");
    check(contains(refused({updates({x, 257, 0}), constant(kCount)}, {1}, {32}), "argument 0"),
          "so is an offset beyond it");
    check(contains(refused({updates(x), constant(Large{})}, {1}, {32}), "larger than 4 KiB"),
          "so are large constants");
    check(contains(refused({updates(metal::DeviceBuffer()), constant(kCount)}, {1}, {32}), "has no buffer"),
          "and no buffer");
    check(contains(refused({reads(x), constant(kCount)}, {1}, {32}), "argument 0 is declared as read"),
          "and a read of what the kernel may write");
    check(contains(refused({updates(x)}, {1}, {32}), "argument 1 is missing"), "and too few arguments");
    check(contains(refused({updates(x), constant(kCount)}, {0}, {32}), "no threads"), "and an empty grid");
    metalsim_set_max_threads("advance", 64);
    metal::Kernels limited(gpu.device, {}, std::span(&arithmetic, 1));
    const metal::Kernel& advance = limited.get("arithmetic", "advance");
    const std::string error =
        error_of([&] { pass.launch(advance, {updates(x), constant(kCount)}, {1}, {32, 4}); });
    check(advance.max_threads() == 64 && contains(error, "128 threads") && contains(error, "allows 64"),
          "and more threads than the pipeline allows: " + error);
    pass.launch(advance, {updates(x), constant(kCount)}, {1}, {64});
    metalsim_set_max_threads(nullptr, 1024);
    pass.commit().wait();
    check(all(x, 1), "refused launches leave the pass usable");
}

}  // namespace

int main() {
    {
        Gpu gpu;
        one_pass(gpu);
        wrong_declarations(gpu);
        passes(gpu);
        in_flight(gpu);
        refusals(gpu);
    }
    full_command_buffers();
    serial();
    check_nothing_is_left();
}
