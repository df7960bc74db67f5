// The kernels: sources embedded in the extension, compiled by the system when a model is loaded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "backend/metal/device.h"

namespace MTL {
class ComputePipelineReflection;
class ComputePipelineState;
class Library;
}  // namespace MTL

namespace lily::metal {

// Version of the shading language: 4.0 has tensor operations and needs macOS 26.
enum class Language : uint8_t { metal_3_1, metal_4_0 };

// A .metal file with its includes put in their place. The name is the file's, without folder and ending.
struct KernelSource {
    std::string_view name;
    std::string_view text;
    Language language = Language::metal_3_1;
};

// The .metal files of metal/ and its folders, embedded at build time (embed_kernels.py).
std::span<const KernelSource> embedded_kernels();

// [[function_constant(index)]] and its value.
struct FunctionConstant {
    uint32_t index;
    std::variant<bool, int32_t, uint32_t, float> value;
    auto operator<=>(const FunctionConstant&) const = default;
};

// What the compiler says of one [[buffer(i)]].
struct Binding {
    bool used = false;
    bool written = false;  // may be
};

// A pipeline. Stays where it is as long as its Kernels.
class Kernel {
  public:
    Kernel(std::string family, std::string name, Owned<MTL::ComputePipelineState> pipeline,
           const MTL::ComputePipelineReflection& reflection);
    ~Kernel();
    const std::string& family() const { return family_; }
    const std::string& name() const { return name_; }
    uint32_t max_threads() const { return max_threads_; }                // in a threadgroup
    uint32_t threadgroup_memory() const { return threadgroup_memory_; }  // bytes, static
    std::span<const Binding> bindings() const { return bindings_; }      // by index
    MTL::ComputePipelineState* handle() const { return pipeline_.get(); }

  private:
    std::string family_, name_;
    Owned<MTL::ComputePipelineState> pipeline_;
    uint32_t max_threads_, threadgroup_memory_;
    std::vector<Binding> bindings_;
};

// One library per source, all compiled at the same time in the background, with safe math; then pipelines,
// made at first use and kept. Any thread may call. Outlives the streams that use its kernels.
class Kernels {
  public:
    using Macros = std::vector<std::pair<std::string, std::string>>;  // {"LILY_ACTIVATION", "float"}

    explicit Kernels(Device& device, Macros macros = {},
                     std::span<const KernelSource> sources = embedded_kernels());
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    // Waits for the family's compilation. BackendError names family, kernel and the compiler's reason; the
    // other families stay usable.
    const Kernel& get(std::string_view family, std::string_view name,
                      std::span<const FunctionConstant> constants = {});
    // Waits for all; the reasons of those that didn't compile, by family.
    std::map<std::string, std::string> failures();
    std::vector<std::string> families() const;
    // Names of a family's kernels; waits for it.
    std::vector<std::string> names(std::string_view family);

  private:
    struct Family;
    struct Key {
        std::string family, name;
        std::vector<FunctionConstant> constants;
        auto operator<=>(const Key&) const = default;
    };
    Family& find(std::string_view family);

    Device& device_;
    std::map<std::string, std::unique_ptr<Family>, std::less<>> families_;
    std::mutex mutex_;  // of pipelines_
    std::map<Key, std::unique_ptr<Kernel>> pipelines_;
};

}  // namespace lily::metal
