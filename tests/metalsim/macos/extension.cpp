// A tiny extension on nanobind and metal-cpp: runs on Linux on the simulator, and is cross-built for macOS.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

NB_MODULE(tiny, m) {
    m.def("device_name", [] {
        auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
        auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
        return std::string(device ? device->name()->utf8String() : "");
    });
    m.def("run", [](const std::string& source, const std::string& kernel) {
        auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
        auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
        NS::Error* error = nullptr;
        auto text = [](const std::string& s) { return NS::String::string(s.c_str(), NS::UTF8StringEncoding); };
        auto library = NS::TransferPtr(device->newLibrary(text(source), nullptr, &error));
        if (!library) throw std::runtime_error(error->localizedDescription()->utf8String());
        auto function = NS::TransferPtr(library->newFunction(text(kernel)));
        auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
        auto queue = NS::TransferPtr(device->newCommandQueue());
        auto memory = NS::TransferPtr(device->newBuffer(256, MTL::ResourceStorageModeShared));
        auto* buffer = queue->commandBuffer();
        auto* encoder = buffer->computeCommandEncoder(MTL::DispatchTypeConcurrent);
        encoder->setComputePipelineState(pipeline.get());
        encoder->setBuffer(memory.get(), 0, 0);
        encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(64, 1, 1));
        encoder->memoryBarrier(MTL::BarrierScopeBuffers);
        encoder->endEncoding();
        double seconds = 0;
        buffer->addCompletedHandler([&](MTL::CommandBuffer* done) { seconds = done->GPUEndTime(); });
        buffer->commit();
        buffer->waitUntilCompleted();
        if (buffer->error()) throw std::runtime_error(buffer->error()->localizedDescription()->utf8String());
        return static_cast<float*>(memory->contents())[63];
    });
}
