// Kernel libraries: shared objects made from .metal sources by the `msl` package.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernel_abi.hpp"

namespace metalsim {

struct Library {
    std::string path;
    std::vector<KernelInfo> kernels;
    std::vector<FunctionConstant*> constants;

    const KernelInfo* find(const std::string& name) const;
    const FunctionConstant* constant(const std::string& name) const;
};

// A function constant given by the host: index and value.
struct ConstantValue {
    int index;
    std::vector<char> value;
};

// A kernel with its constants.
struct Pipeline {
    Library* library = nullptr;
    const KernelInfo* kernel = nullptr;
    std::vector<ConstantValue> constants;
    uint32_t max_threads = 1024;
};

struct CompileOptions {
    std::string language = "3.1";
    std::vector<std::string> macros;  // NAME=VALUE
};

// Loads a compiled library; loading the same file again gives the same object. nullptr and `error` on
// failure.
Library* open_library(const std::string& path, std::string& error);
// Compiles MSL source with the checked or the fast build, as configured, and loads it. The text of a failed
// compilation is clang's, with lines of the source.
Library* compile_library(const std::string& source, const CompileOptions& options, std::string& error);

// Bytes of threadgroup memory that the kernel's variables take.
uint32_t static_threadgroup_memory(const KernelInfo& kernel);
// Sets the library's function constants for the next dispatch.
void apply_constants(const Pipeline& pipeline);

}  // namespace metalsim
