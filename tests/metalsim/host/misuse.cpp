// Each misuse of Metal ends the process with a message that names it. usage: misuse NAME
#include <cstdio>
#include <map>

#include "gpu.hpp"

namespace {

MTL::ComputeCommandEncoder* encoder(MTL::Device* d) {
    return d->newCommandQueue()->commandBuffer()->computeCommandEncoder(MTL::DispatchTypeSerial);
}

const std::map<std::string, std::function<void(MTL::Device*)>> cases = {
    {"over-release",
     [](MTL::Device* d) {
         auto* b = d->newBuffer(16, MTL::ResourceStorageModeShared);
         b->release();
         b->release();
     }},
    {"use-after-release",
     [](MTL::Device* d) {
         auto* b = d->newBuffer(16, MTL::ResourceStorageModeShared);
         b->release();
         b->contents();
     }},
    {"commit-without-end",
     [](MTL::Device* d) {
         auto* c = d->newCommandQueue()->commandBuffer();
         c->computeCommandEncoder(MTL::DispatchTypeSerial);
         c->commit();
     }},
    {"dropped-encoder",
     [](MTL::Device* d) {
         auto* pool = NS::AutoreleasePool::alloc()->init();
         encoder(d);
         pool->release();
     }},
    {"unimplemented", [](MTL::Device* d) { d->newHeap(static_cast<MTL::HeapDescriptor*>(nullptr)); }},
    {"long-bytes",
     [](MTL::Device* d) {
         static char bytes[5000];
         encoder(d)->setBytes(bytes, sizeof bytes, 0);
     }},
    {"no-pipeline",
     [](MTL::Device* d) { encoder(d)->dispatchThreads(MTL::Size(1, 1, 1), MTL::Size(1, 1, 1)); }},
    {"two-encoders",
     [](MTL::Device* d) {
         auto* c = d->newCommandQueue()->commandBuffer();
         c->computeCommandEncoder();
         c->computeCommandEncoder();
     }},
    {"wait-before-commit",
     [](MTL::Device* d) { d->newCommandQueue()->commandBuffer()->waitUntilCompleted(); }},
    {"late-handler",
     [](MTL::Device* d) {
         auto* c = d->newCommandQueue()->commandBuffer();
         c->commit();
         c->addCompletedHandler([](MTL::CommandBuffer*) {});
     }},
    {"binding-index", [](MTL::Device* d) { encoder(d)->setBuffer(nullptr, 0, 31); }},
    {"threadgroup-length", [](MTL::Device* d) { encoder(d)->setThreadgroupMemoryLength(100, 0); }},
};

}  // namespace

int main(int, char** argv) {
    if (argv[1] == std::string("no-pool")) MTL::CreateSystemDefaultDevice()->name();
    gpu::Pool pool;
    cases.at(argv[1])(MTL::CreateSystemDefaultDevice());
    printf("nothing happened\n");
}
