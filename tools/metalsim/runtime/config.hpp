// Settings of the simulated device, read from the environment when the library loads.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace metalsim {

struct Config {
    std::atomic<uint64_t> seed{0};
    std::atomic<bool> checks{true};
    std::atomic<uint64_t> working_set{16ull << 30};
    std::atomic<uint64_t> max_buffer{16ull << 30};
    std::atomic<double> wait_timeout{10.0};
    std::atomic<int> macos_major{15}, macos_minor{0};
    uint32_t max_threadgroup_memory = 32768;

    Config();
    // The pipeline limit of a kernel: its own declaration, lowered by what was set for it or for all.
    uint32_t max_threads(const std::string& kernel, uint32_t declared) const;
    void set_max_threads(const char* kernel, uint32_t limit);
    std::string architecture() const;
    int apple_family() const;
    void set_family(const std::string& architecture, int family);

  private:
    mutable std::mutex mutex_;
    std::map<std::string, uint32_t> kernel_limits_;
    uint32_t limit_ = 1024;
    std::string architecture_ = "applegpu_g13g";
    int apple_family_ = 7;
};

Config& config();

// Path of the tools directory and of the Python interpreter that compiles kernels at run time.
std::string tools_directory();
std::string python_executable();

}  // namespace metalsim
