// Each failure of the system ends in an exception that names what failed; nothing leaks; work goes on.
#include "device_fixture.hpp"

namespace {

void libraries() {
    metal::Device device;
    const metal::KernelSource sources[] = {arithmetic, broken};
    metal::Kernels kernels(device, {{"STEP", "4.0f"}}, sources);
    const std::string error = error_of([&] { kernels.get("broken", "k"); });
    check(contains(error, "'k' of family 'broken'") && contains(error, "broken.metal:3:") &&
              contains(error, "undeclared identifier 'nope'"),
          "a family that does not compile names itself, kernel, line and reason: " +
              error.substr(0, error.find('\n')));
    check(kernels.failures().size() == 1 && kernels.failures().count("broken") == 1, "it is listed");
    const metal::Kernel& advance = kernels.get("arithmetic", "advance");
    check(advance.name() == "advance" && advance.family() == "arithmetic", "the others are usable");
    check(&kernels.get("arithmetic", "advance") == &advance, "a pipeline is made once");
    check(kernels.families() == std::vector<std::string>{"arithmetic", "broken"} &&
              kernels.names("arithmetic").size() == 3,
          "families and kernels can be listed");
    check(contains(error_of([&] { kernels.get("arithmetic", "absent"); }), "'absent' of family 'arithmetic'"),
          "a kernel that is not there is named");
    check(contains(error_of([&] { kernels.get("other", "k"); }), "no kernel family 'other'"),
          "so is a family");

    metal::CommandStream stream(device);
    auto x = device.allocate(256, "x");
    std::fill_n(x.as<float>(), kCount, 0.0f);
    const metal::FunctionConstant doubled[] = {{0, 2.0f}}, halved[] = {{0, 0.5f}};
    const metal::Kernel& twice = kernels.get("arithmetic", "scaled", doubled);
    check(&twice != &kernels.get("arithmetic", "scaled", halved), "constants make pipelines of their own");
    metal::Pass pass = stream.begin("constants");
    pass.launch(advance, {updates(x), constant(kCount)}, {2}, {32});
    pass.launch(twice, {updates(x)}, {2}, {32});
    pass.commit().wait();
    check(all(x, 8), "macros and constants have their values");

    for (const char* kind : {"function", "pipeline"}) {
        metalsim_fault(kind, 1, 1, 1);
        check(contains(error_of([&] { kernels.get("arithmetic", "add"); }), "'add' of family 'arithmetic'"),
              std::string("a failing ") + kind + " is named");
    }
    check(!kernels.get("arithmetic", "add").name().empty(), "the next attempt succeeds");

    metalsim_fault("library", 1, 1, 1);
    metal::Kernels failing(device, {}, std::span(&arithmetic, 1));
    check(contains(failing.failures()["arithmetic"], "injected fault"), "a compiler that fails is reported");
    metal::Kernels again(device, {}, std::span(&arithmetic, 1));
    check(again.failures().empty(), "and may be asked again");
}

void languages() {
    const metal::KernelSource source{"newer", R"(
#include <metal_stdlib>
#if __METAL_VERSION__ < 400
#error an older language
#endif
kernel void k(device float* a [[buffer(0)]]) { a[0] = 1.0f; }
)",
                                     metal::Language::metal_4_0};
    metal::Device device;
    metal::Kernels older(device, {}, std::span(&source, 1));
    check(contains(error_of([&] { older.get("newer", "k"); }), "Metal 4.0 needs macOS 26"),
          "a newer language than the system's is not tried");
    metalsim_set_macos(26, 0);
    metal::Kernels newer(device, {}, std::span(&source, 1));
    check(newer.get("newer", "k").name() == "k", "a newer system compiles it");
    metalsim_set_macos(15, 0);
}

void objects() {
    for (const char* kind : {"queue", "fence"}) {
        metal::Device device;
        metalsim_fault(kind, 1, 1, 1);
        const std::string error = error_of([&] { metal::CommandStream stream(device); });
        check(
            contains(error, std::string("no ") + (kind == std::string("queue") ? "command queue" : "fence")),
            error);
    }
    metalsim_fault("residency", 1, 1, 1);
    check(contains(error_of([] { metal::Device(); }), "no residency set"), "a missing residency set");

    metal::Device device;
    metalsim_fault("buffer", 1, 1, 1);
    const std::string error = error_of([&] { device.allocate(64, "weights"); });
    check(contains(error, "no memory for the buffer 'weights'"), "an allocation that fails: " + error);
    check(device.allocated() == 0, "is not counted");
    check(bool(device.allocate(64, "weights")), "and may be tried again");
}

void command_buffers() {
    Gpu gpu;
    auto x = gpu.floats(0);
    const auto pass = [&](const char* label) {
        metal::Pass pass = gpu.stream.begin(label);
        gpu.launch_advance(pass, x);
        return pass.commit();
    };
    metalsim_fault("command_buffer", 1, 8, 1);
    std::string error = error_of([&] { pass("decode").wait(); });
    check(contains(error, "Metal pass 'decode', 1 launches (advance) failed: the GPU ran out of memory") &&
              contains(error, "injected fault") && contains(error, "(code 8)"),
          "a failing command buffer names pass, kernels and reason: " + error);
    check(error_of([&] { pass("next").wait(); }).empty() && all(x, 1), "the next one runs");

    metalsim_fault("timeout", 1, 2, 1);
    error = error_of([&] { pass("slow").wait(); });
    check(contains(error, "longer than the system allows") && contains(error, "(code 2)"),
          "a timeout: " + error);

    metalsim_fault("command_buffer", 1, 1, 1);
    metal::Completion first = pass("first"), second = pass("second");
    error = error_of([&] { second.wait(); });
    check(contains(error, "'second' has no valid result, for an earlier one failed: Metal pass 'first'"),
          "a pass that was committed on top of a failed one fails too: " + error);
    check(contains(error_of([&] { first.wait(); }), "'first'"), "the first one tells");
    check(contains(error_of([&] { first.wait(); }), "'first'"), "as often as it is asked");
    check(error_of([&] { pass("third").wait(); }).empty(), "what is committed afterwards is valid");

    metalsim_fault("command_buffer", 1, 1, 1);
    first = pass("first");
    second = pass("second");
    metal::Completion third = pass("third");  // the first is done by now, but nobody has been told
    check(contains(error_of([&] { third.wait(); }), "'third' has no valid result"), "also three deep");
    check(error_of([&] { pass("fourth").wait(); }).empty(), "until one of them told");

    metalsim_fault("command_buffer", 1, 4, 1);
    error = error_of([&] { pass("ignored").wait(); });
    check(contains(error, "takes no more work") && contains(gpu.stream.broken(), "'ignored'"),
          "a failure that lasts is told");
    error = error_of([&] { gpu.stream.begin("later"); });
    check(contains(error, "start the process again"), "and refuses what comes later: " + error);
}

void command_buffer_of_several() {
    Gpu gpu({.command_buffer_bytes = 1});
    auto x = gpu.floats(0), y = gpu.floats(0);
    metalsim_fault("command_buffer", 2, 3, 1);
    metal::Pass pass = gpu.stream.begin("split");
    gpu.launch_advance(pass, x);
    gpu.launch_add(pass, x, x, y);
    gpu.launch_advance(pass, y);
    const std::string error = error_of([&] { pass.commit().wait(); });
    check(contains(error, "1 launches (add) failed: a kernel touched memory"),
          "of several command buffers the failing one is told: " + error);

    metalsim_fault("command_buffer", 1, 1, 1);
    {
        metal::Pass dropped = gpu.stream.begin("dropped");
        gpu.launch_advance(dropped, x);
        gpu.launch_advance(dropped, x);
    }
    metal::Pass after = gpu.stream.begin("after");
    gpu.launch_advance(after, x);
    check(contains(error_of([&] { after.commit().wait(); }), "'dropped'"),
          "a failed part of a pass that was given up is told by the next");
}

}  // namespace

int main() {
    libraries();
    languages();
    objects();
    command_buffers();
    command_buffer_of_several();
    check_nothing_is_left();
}
