#include "backend/metal/kernel_library.h"

#include <Metal/Metal.hpp>
#include <future>
#include <utility>

#include "backend/metal/autorelease.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr uint32_t kLanes = 32;  // of a simdgroup, which the kernels count on

// A library, or why there is none.
struct Compiled {
    Owned<MTL::Library> library;
    std::string failure;
};

Compiled compile(MTL::Device* device, const std::string& text, Language language) {
    const AutoreleaseScope scope;
    const bool newer = language == Language::metal_4_0;
    if (newer && !system_at_least(26)) return {{}, "Metal 4.0 needs macOS 26"};
    const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    options->setLanguageVersion(newer ? MTL::LanguageVersion4_0 : MTL::LanguageVersion3_1);
    if (system_at_least(15)) {
        options->setMathMode(MTL::MathModeSafe);
    } else {
        options->setFastMathEnabled(false);
    }
    NS::Error* error = nullptr;  // also carries warnings
    auto library = NS::TransferPtr(device->newLibrary(to_ns(text), options.get(), &error));
    if (!library) return {{}, reason_of(error)};
    return {std::move(library), ""};
}

std::string with_macros(const KernelSource& source, const Kernels::Macros& macros) {
    std::string text;
    for (const auto& [name, value] : macros) text += "#define " + name + " " + value + "\n";
    text += "#line 1 \"" + std::string(source.name) + ".metal\"\n";
    return text + std::string(source.text);
}

MTL::DataType data_type(const FunctionConstant& constant) {
    static constexpr MTL::DataType types[] = {MTL::DataTypeBool, MTL::DataTypeInt, MTL::DataTypeUInt,
                                              MTL::DataTypeFloat};
    return types[constant.value.index()];
}

}  // namespace

struct Kernels::Family {
    std::shared_future<Compiled> compiled;
};

Kernel::Kernel(std::string family, std::string name, Owned<MTL::ComputePipelineState> pipeline,
               const MTL::ComputePipelineReflection& reflection)
    : family_(std::move(family)),
      name_(std::move(name)),
      pipeline_(std::move(pipeline)),
      max_threads_(static_cast<uint32_t>(pipeline_->maxTotalThreadsPerThreadgroup())),
      threadgroup_memory_(static_cast<uint32_t>(pipeline_->staticThreadgroupMemoryLength())) {
    const NS::Array* bindings = reflection.bindings();
    for (NS::UInteger i = 0; i < bindings->count(); ++i) {
        const auto* binding = bindings->object<MTL::Binding>(i);
        if (binding->type() != MTL::BindingTypeBuffer) continue;
        if (bindings_.size() <= binding->index()) bindings_.resize(binding->index() + 1);
        bindings_[binding->index()] = {binding->isUsed(), binding->access() != MTL::BindingAccessReadOnly};
    }
}

Kernel::~Kernel() = default;

Kernels::Kernels(Device& device, Macros macros, std::span<const KernelSource> sources) : device_(device) {
    for (const KernelSource& source : sources) {
        auto compiled = std::async(std::launch::async, compile, device.handle(), with_macros(source, macros),
                                   source.language);
        families_[std::string(source.name)] = std::make_unique<Family>(Family{std::move(compiled)});
    }
}

Kernels::~Kernels() = default;

Kernels::Family& Kernels::find(std::string_view family) {
    const auto found = families_.find(family);
    if (found == families_.end())
        throw BackendError("there is no kernel family '" + std::string(family) + "'");
    return *found->second;
}

const Kernel& Kernels::get(std::string_view family, std::string_view name,
                           std::span<const FunctionConstant> constants) {
    const AutoreleaseScope scope;
    Key key{std::string(family), std::string(name), {constants.begin(), constants.end()}};
    const std::string what = "Metal kernel '" + key.name + "' of family '" + key.family + "'";
    {
        const std::lock_guard lock(mutex_);
        if (const auto known = pipelines_.find(key); known != pipelines_.end()) return *known->second;
    }
    const Compiled& compiled = find(family).compiled.get();
    if (!compiled.library) {
        throw BackendError(what + " can't be used: the family did not compile: " + compiled.failure);
    }
    const auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    for (const FunctionConstant& constant : constants) {
        std::visit(
            [&](const auto& value) { values->setConstantValue(&value, data_type(constant), constant.index); },
            constant.value);
    }
    NS::Error* error = nullptr;
    const auto function =
        NS::TransferPtr(compiled.library->newFunction(to_ns(key.name), values.get(), &error));
    if (!function) throw BackendError(what + " was not found: " + reason_of(error));
    MTL::AutoreleasedComputePipelineReflection reflection = nullptr;
    auto pipeline = NS::TransferPtr(device_.handle()->newComputePipelineState(
        function.get(), MTL::PipelineOptionBindingInfo, &reflection, &error));
    if (!pipeline || !reflection) throw BackendError(what + " made no pipeline: " + reason_of(error));
    if (pipeline->threadExecutionWidth() != kLanes) {
        throw BackendError(what + " runs in simdgroups of " +
                           std::to_string(pipeline->threadExecutionWidth()) + " lanes on " + device_.name() +
                           ", it needs " + std::to_string(kLanes));
    }
    auto kernel = std::make_unique<Kernel>(key.family, key.name, std::move(pipeline), *reflection);
    const std::lock_guard lock(mutex_);
    return *pipelines_.try_emplace(std::move(key), std::move(kernel)).first->second;
}

std::map<std::string, std::string> Kernels::failures() {
    std::map<std::string, std::string> failures;
    for (auto& [name, family] : families_) {
        const Compiled& compiled = family->compiled.get();
        if (!compiled.library) failures[name] = compiled.failure;
    }
    return failures;
}

std::vector<std::string> Kernels::families() const {
    std::vector<std::string> names;
    for (const auto& [name, family] : families_) names.push_back(name);
    return names;
}

std::vector<std::string> Kernels::names(std::string_view family) {
    const AutoreleaseScope scope;
    const Compiled& compiled = find(family).compiled.get();
    std::vector<std::string> names;
    if (!compiled.library) return names;
    const NS::Array* functions = compiled.library->functionNames();
    for (NS::UInteger i = 0; i < functions->count(); ++i)
        names.push_back(to_std(functions->object<NS::String>(i)));
    return names;
}

}  // namespace lily::metal
