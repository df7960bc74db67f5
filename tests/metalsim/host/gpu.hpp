// A small host layer on metal-cpp for the test programs; it would compile for macOS as it is.
#pragma once
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpu {

template <class T>
using Owned = NS::SharedPtr<T>;

inline NS::String* text(const std::string& s) {
    return NS::String::string(s.c_str(), NS::UTF8StringEncoding);
}
inline std::string reason(NS::Error* e) {
    return e ? e->localizedDescription()->utf8String() : "no reason given";
}

class Pool {
  public:
    Pool() : pool_(NS::TransferPtr(NS::AutoreleasePool::alloc()->init())) {}

  private:
    Owned<NS::AutoreleasePool> pool_;
};

struct Gpu {
    Owned<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
    Owned<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
    Owned<MTL::Library> library;

    void load(const std::string& source) {
        NS::Error* error = nullptr;
        auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
        options->setLanguageVersion(MTL::LanguageVersion3_1);
        options->setMathMode(MTL::MathModeSafe);
        auto loaded = NS::TransferPtr(device->newLibrary(text(source), options.get(), &error));
        if (!loaded) throw std::runtime_error(reason(error));
        library = loaded;
    }
    Owned<MTL::ComputePipelineState> pipeline(const std::string& name) {
        NS::Error* error = nullptr;
        auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
        auto function = NS::TransferPtr(library->newFunction(text(name), constants.get(), &error));
        if (!function) throw std::runtime_error(reason(error));
        auto p = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
        if (!p) throw std::runtime_error(reason(error));
        return p;
    }
    Owned<MTL::Buffer> buffer(size_t bytes, MTL::ResourceOptions options = MTL::ResourceStorageModeShared) {
        auto b = NS::TransferPtr(device->newBuffer(bytes, options));
        if (!b) throw std::runtime_error("no buffer of " + std::to_string(bytes) + " bytes");
        return b;
    }
};

// Waits and throws the command buffer's error.
inline void finish(MTL::CommandBuffer* c) {
    c->commit();
    c->waitUntilCompleted();
    if (c->status() == MTL::CommandBufferStatusError) throw std::runtime_error(reason(c->error()));
}

template <class T>
T* contents(const Owned<MTL::Buffer>& b) {
    return static_cast<T*>(b->contents());
}

}  // namespace gpu
