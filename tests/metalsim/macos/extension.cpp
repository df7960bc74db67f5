// A tiny extension on nanobind and metal-cpp for the cross-build.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

namespace nb = nanobind;

NB_MODULE(tiny, m) {
    m.def("device_name", [] {
        auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
        auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
        return std::string(device ? device->name()->utf8String() : "");
    });
    m.def("run", [](const std::string& source) {
        auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
        auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
        NS::Error* error = nullptr;
        auto text = NS::String::string(source.c_str(), NS::UTF8StringEncoding);
        auto library = NS::TransferPtr(device->newLibrary(text, nullptr, &error));
        auto queue = NS::TransferPtr(device->newCommandQueue());
        auto* buffer = queue->commandBuffer();
        auto* encoder = buffer->computeCommandEncoder(MTL::DispatchTypeConcurrent);
        encoder->memoryBarrier(MTL::BarrierScopeBuffers);
        encoder->endEncoding();
        buffer->addCompletedHandler([](MTL::CommandBuffer* done) { (void)done->GPUEndTime(); });
        buffer->commit();
        buffer->waitUntilCompleted();
        return bool(library);
    });
}
