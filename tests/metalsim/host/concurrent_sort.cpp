// Counting sort by three dispatches in one concurrent encoder, with and without a barrier.
// usage: concurrent_sort sort.metal
#include <fstream>
#include <iterator>

#include "check.hpp"
#include "gpu.hpp"
#include "metalsim.h"

namespace {

struct Parameters {
    uint32_t n, bins;
};

struct Sort {
    gpu::Gpu& gpu;
    Parameters p{1000, 50};
    gpu::Owned<MTL::Buffer> keys = gpu.buffer(p.n * 4), counts = gpu.buffer(p.bins * 4),
                            offsets = gpu.buffer(p.bins * 4), order = gpu.buffer(p.n * 4);
    gpu::Owned<MTL::ComputePipelineState> hist = gpu.pipeline("hist"), scan = gpu.pipeline("scan"),
                                          scatter = gpu.pipeline("scatter");
    double seconds = 0;

    // How the first barrier is given.
    enum class Barrier { scope, resources, none };

    void run(Barrier barrier) {
        gpu::Pool pool;
        auto* k = gpu::contents<uint32_t>(keys);
        for (uint32_t i = 0; i < p.n; i++) k[i] = i * 7919 % p.bins;
        memset(counts->contents(), 0, p.bins * 4);
        MTL::CommandBuffer* c = gpu.queue->commandBuffer();
        MTL::ComputeCommandEncoder* e = c->computeCommandEncoder(MTL::DispatchTypeConcurrent);
        auto bind = [&](MTL::ComputePipelineState* pipeline, std::vector<MTL::Buffer*> buffers) {
            e->setComputePipelineState(pipeline);
            std::vector<NS::UInteger> zeros(buffers.size());
            e->setBuffers(buffers.data(), zeros.data(), NS::Range(0, buffers.size()));
            e->setBytes(&p, sizeof p, buffers.size());
        };
        bind(hist.get(), {keys.get(), counts.get()});
        e->dispatchThreads(MTL::Size(p.n, 1, 1), MTL::Size(256, 1, 1));
        const MTL::Resource* resources[] = {counts.get()};
        if (barrier == Barrier::scope) e->memoryBarrier(MTL::BarrierScopeBuffers);
        if (barrier == Barrier::resources) e->memoryBarrier(resources, 1);
        bind(scan.get(), {counts.get(), offsets.get()});
        e->dispatchThreadgroups(MTL::Size(1, 1, 1), MTL::Size(256, 1, 1));
        e->memoryBarrier(MTL::BarrierScopeBuffers);
        bind(scatter.get(), {keys.get(), offsets.get(), order.get()});
        e->dispatchThreads(MTL::Size(p.n, 1, 1), MTL::Size(256, 1, 1));
        e->endEncoding();
        c->addCompletedHandler(
            [this](MTL::CommandBuffer* done) { seconds = done->GPUEndTime() - done->GPUStartTime(); });
        gpu::finish(c);
    }

    bool sorted() const {
        auto *k = gpu::contents<uint32_t>(keys), *o = gpu::contents<uint32_t>(order);
        for (uint32_t i = 1; i < p.n; i++)
            if (k[o[i - 1]] > k[o[i]]) return false;
        return true;
    }
};

}  // namespace

int main(int, char** argv) {
    {
        gpu::Pool pool;
        gpu::Gpu gpu;
        std::ifstream file(argv[1]);
        gpu.load(std::string(std::istreambuf_iterator<char>(file), {}));
        Sort sort{gpu};
        sort.run(Sort::Barrier::scope);
        check(sort.sorted(), "sorts in a concurrent encoder");
        check(sort.seconds > 0, "the completion handler sees GPU times");
        metalsim_counters counted;
        metalsim_counters_get(&counted);
        check(counted.dispatches == 3 && counted.barriers == 2 && counted.stages == 3,
              "counts dispatches, barriers, stages");
        sort.run(Sort::Barrier::resources);
        check(sort.sorted() && metalsim_diagnostic_count() == 0, "a barrier on the resource is enough");
        std::string error = error_of([&] { sort.run(Sort::Barrier::none); });
        check(contains(error, "dispatch-hazard"),
              "a missing barrier is the command buffer's error: " + error);
        metalsim_diagnostics_clear();
        sort.run(Sort::Barrier::scope);
        check(sort.sorted(), "the device stays usable");
        error = error_of([&] {
            gpu.load(
                "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* a "
                "[[buffer(0)]]) { a[0] = nope; }");
        });
        check(contains(error, "program_source:3:") && contains(error, "undeclared identifier 'nope'"),
              "a compile error has the line: " + error.substr(0, error.find('\n')));
        check(contains(error_of([&] { gpu.pipeline("absent"); }), "absent"), "a missing function is named");
    }
    check(metalsim_live_objects("MTLBuffer") == 0, "no buffer is left");
    check(metalsim_live_objects("MTLCommandBuffer") == 0, "no command buffer is left");
    check(metalsim_allocated_bytes() == 0, "no memory is left");
}
