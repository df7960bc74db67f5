// Memory within a budget, what the device says of itself, and which devices are refused.
#include <cstdlib>
#include <memory>
#include <thread>

#include "device_fixture.hpp"

namespace {

constexpr uint64_t kPage = 16384;

void budget() {
    metalsim_set_working_set(100 * kPage);
    metal::Device device;
    check(device.budget() == 100 * kPage && device.working_set() == 100 * kPage,
          "the budget is what the system recommends");
    metal::DeviceBuffer first = device.allocate(60 * kPage, "first");
    check(device.allocated() == 60 * kPage, "memory is accounted for");
    const std::string error = error_of([&] { device.allocate(41 * kPage, "second"); });
    check(contains(error, "'second' needs 656.00 KiB of GPU memory, 640.00 KiB of 1.56 MiB are left"),
          "a buffer beyond the budget is refused, need and rest named: " + error);
    check(metalsim_live_objects("MTLBuffer") == 1 && device.allocated() == 60 * kPage,
          "before anything is allocated");
    check(contains(error_of([&] { device.require(41 * kPage, "the weights"); }), "the weights needs"),
          "a sum can be asked for beforehand");
    device.require(40 * kPage, "the weights");

    metal::DeviceBuffer small = device.allocate(1, "small");
    check(small.size() == 1 && device.allocated() == 61 * kPage, "whole pages count");
    metal::DeviceBuffer moved = std::move(small);
    check(
        !small && moved && moved.size() == 1 && moved.label() == "small" && device.allocated() == 61 * kPage,
        "a buffer moves");
    moved = device.allocate(2 * kPage, "other");
    check(device.allocated() == 62 * kPage, "assignment frees the old one");
    first = {};
    check(device.allocated() == 2 * kPage && metalsim_live_objects("MTLBuffer") == 1, "freed memory returns");
    first = device.allocate(98 * kPage, "whole");
    check(bool(first), "and can be had again");
    check(contains(error_of([&] { device.allocate(0, "none"); }), "'none' would be empty"),
          "an empty buffer is refused");

    metal::Device limited(10 * kPage);
    check(contains(error_of([&] { limited.allocate(11 * kPage, "x"); }), "160.00 KiB"),
          "a smaller budget can be set");
    metalsim_set_working_set(uint64_t{16} << 30);
    metalsim_set_max_buffer(5 * kPage);
    metal::Device other;
    check(contains(error_of([&] { other.allocate(6 * kPage, "long"); }), "at most 80.00 KiB in one"),
          "the largest buffer is a limit of its own");
    metalsim_set_max_buffer(uint64_t{16} << 30);
}

void lifetimes() {
    metal::DeviceBuffer survivor;
    {
        metal::Device device;
        survivor = device.allocate(64, "survivor");
    }
    survivor.as<float>()[15] = 1;
    check(survivor.as<float>()[15] == 1, "a buffer may outlive its device");
    survivor = {};

    Gpu gpu;
    auto out = gpu.floats(0);
    metal::Completion done;
    {
        auto x = gpu.floats(1), y = gpu.floats(2);
        metal::Pass pass = gpu.stream.begin("dropped inputs");
        gpu.launch_add(pass, x, y, out);
        done = pass.commit();
    }
    done.wait();
    check(all(out, 3), "a buffer that is dropped while the GPU uses it stays until then");
    check(gpu.device.allocated() == kPage, "its memory is not counted any more");
}

void memory_of_the_host() {
    Gpu gpu;
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kPage, 2 * kPage),
                                                             &std::free);
    auto* pages = static_cast<std::byte*>(memory.get());
    {
        metal::DeviceBuffer first = gpu.device.adopt(pages, kPage, "first page");
        metal::DeviceBuffer both = gpu.device.adopt(pages, 2 * kPage, "both pages");
        check(both.contents() == pages && gpu.device.allocated() == 3 * kPage,
              "buffers lie over memory of the host, and count");
        std::fill_n(both.as<float>(), kCount, 1.0f);
        metal::Pass pass = gpu.stream.begin("host");
        gpu.launch_advance(pass, {both, 0, 256});
        pass.commit().wait();
        check(first.as<float>()[kCount - 1] == 2,
              "what a launch writes through one is seen through the other");
    }
    check(gpu.device.allocated() == 0, "the memory outlives them");
    pages[0] = std::byte{1};
}

void devices() {
    const metal::Device device;
    check(
        device.name() == "Simulated GPU" && device.architecture() == "applegpu_g13g" && device.family() == 7,
        "the device says what it is");
    check(metal::unavailable_reason().empty(), "Metal is available");
    check(device.residency() != nullptr, "macOS 15 has residency sets");
    metalsim_set_family("applegpu_g17s", 10);
    check(metal::Device().family() == 10, "a newer family is known");
    metalsim_set_macos(14, 0);
    {
        Gpu gpu;
        auto x = gpu.floats(0);
        metal::Pass pass = gpu.stream.begin("old system");
        gpu.launch_advance(pass, x);
        pass.commit().wait();
        check(all(x, 1) && !gpu.device.residency(), "macOS 14 works without them");
    }
    metalsim_set_macos(16, 2);
    check(metal::system_at_least(26, 2) && !metal::system_at_least(26, 3) && !metal::system_at_least(27),
          "macOS 26 may call itself 16");
    metalsim_set_macos(26, 2);
    check(metal::system_at_least(26, 2) && !metal::system_at_least(26, 3) && !metal::system_at_least(27),
          "or 26");
    metalsim_set_macos(13, 6);
    check(contains(error_of([] { metal::Device(); }), "needs macOS 14"), "an older system is refused");
    check(contains(metal::unavailable_reason(), "needs macOS 14"), "with the reason");
    metalsim_set_macos(15, 0);
    metalsim_set_family("applegpu_g12p", 6);
    check(contains(error_of([] { metal::Device(); }), "older than Apple's M1"), "so is an older GPU");
    metalsim_set_family("applegpu_g13g", 7);
}

void threads() {
    metal::Device device;
    metal::Kernels kernels(device, {}, std::span(&arithmetic, 1));
    std::vector<std::thread> workers;
    std::vector<const metal::Kernel*> found(8);
    std::vector<std::string> errors(8);
    for (size_t i = 0; i < found.size(); ++i) {
        workers.emplace_back([&, i] {
            errors[i] = error_of([&] {
                found[i] = &kernels.get("arithmetic", "advance");
                metal::CommandStream stream(device);
                std::vector<metal::DeviceBuffer> buffers;
                for (int n = 1; n <= 10; ++n) {
                    buffers.push_back(device.allocate(256, "thread"));
                    std::fill_n(buffers.back().as<float>(), kCount, 0.0f);
                    metal::Pass pass = stream.begin("thread");
                    pass.launch(*found[i], {updates(buffers.back()), constant(kCount)}, {2}, {32});
                    pass.commit().wait();
                    if (!all(buffers.back(), 1)) throw lily::Error("wrong result");
                }
            });
        });
    }
    for (std::thread& worker : workers) worker.join();
    bool same = true, good = true;
    for (size_t i = 0; i < found.size(); ++i) {
        same &= found[i] == found[0];
        good &= errors[i].empty();
    }
    check(same, "all threads get the same pipeline");
    check(good, "eight threads work on streams of their own: " + errors[0]);
    check(device.allocated() == 0, "and the account is even");
}

}  // namespace

int main() {
    budget();
    lifetimes();
    memory_of_the_host();
    devices();
    threads();
    check_nothing_is_left();
}
