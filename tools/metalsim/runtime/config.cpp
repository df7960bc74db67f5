#include "config.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace metalsim {

namespace {
const char* environment(const char* name) {
    const char* value = getenv(name);
    return value && *value ? value : nullptr;
}
}  // namespace

Config::Config() {
    if (const char* v = environment("METALSIM_SEED")) seed = strtoull(v, nullptr, 10);
    if (const char* v = environment("METALSIM_CHECKS")) checks = atoi(v) != 0;
    if (const char* v = environment("METALSIM_MAX_THREADS")) limit_ = uint32_t(atoi(v));
    if (const char* v = environment("METALSIM_WORKING_SET")) working_set = strtoull(v, nullptr, 10);
    if (const char* v = environment("METALSIM_MAX_BUFFER")) max_buffer = strtoull(v, nullptr, 10);
    if (const char* v = environment("METALSIM_WAIT_TIMEOUT")) wait_timeout = atof(v);
    if (const char* v = environment("METALSIM_MACOS")) {
        int major = 15, minor = 0;
        sscanf(v, "%d.%d", &major, &minor);
        macos_major = major;
        macos_minor = minor;
    }
    if (const char* v = environment("METALSIM_GPU")) {
        std::string text = v;
        size_t colon = text.find(':');
        architecture_ = text.substr(0, colon);
        if (colon != std::string::npos) apple_family_ = atoi(text.c_str() + colon + 1);
    }
}

uint32_t Config::max_threads(const std::string& kernel, uint32_t declared) const {
    std::lock_guard lock(mutex_);
    auto own = kernel_limits_.find(kernel);
    return std::min({declared, limit_, own == kernel_limits_.end() ? 1024u : own->second});
}

void Config::set_max_threads(const char* kernel, uint32_t limit) {
    std::lock_guard lock(mutex_);
    if (!kernel) {
        limit_ = limit;
        kernel_limits_.clear();
    } else {
        kernel_limits_[kernel] = limit;
    }
}

std::string Config::architecture() const {
    std::lock_guard lock(mutex_);
    return architecture_;
}

int Config::apple_family() const {
    std::lock_guard lock(mutex_);
    return apple_family_;
}

void Config::set_family(const std::string& architecture, int family) {
    std::lock_guard lock(mutex_);
    architecture_ = architecture;
    apple_family_ = family;
}

Config& config() {
    // Never destroyed: queue threads may outlive static destruction.
    static Config* instance = new Config;
    return *instance;
}

std::string tools_directory() {
    const char* v = environment("METALSIM_TOOLS");
    return v ? v : METALSIM_TOOLS_DIRECTORY;
}

std::string python_executable() {
    const char* v = environment("METALSIM_PYTHON");
    return v ? v : METALSIM_PYTHON_EXECUTABLE;
}

}  // namespace metalsim
