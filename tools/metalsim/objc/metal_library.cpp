// MTLLibrary, MTLFunction, function constants and compute pipelines.
#include <cstring>

#include "config.hpp"
#include "faults.hpp"
#include "metal.hpp"

namespace metalsim::objc {

namespace {

const char* const library_domain = "MTLLibraryErrorDomain";
constexpr long compile_failure = 3, function_not_found = 5;

// MTLDataType of scalars and vectors that a function constant may have.
size_t size_of_type(unsigned long type) {
    struct Entry {
        unsigned long first;  // scalar; 2, 3 and 4 components follow
        size_t size;
    };
    static const Entry entries[] = {{3, 4},  {16, 2}, {29, 4}, {33, 4}, {37, 2}, {41, 2},
                                    {45, 1}, {49, 1}, {53, 1}, {81, 8}, {85, 8}, {121, 2}};
    for (const Entry& e : entries)
        if (type >= e.first && type < e.first + 4) {
            unsigned long components = type - e.first + 1;
            return e.size * (components == 3 ? 4 : components);
        }
    misuse("function constant of data type " + std::to_string(type));
}

std::string language_name(unsigned long version) {
    return std::to_string(version >> 16) + "." + std::to_string(version & 0xFFFF);
}

MetalLibrary* new_library(Object* source, CompileOptions* options, Error** error) {
    if (faults::strike("library")) {
        give_error(error, library_domain, compile_failure, "injected fault: the library does not compile");
        return nullptr;
    }
    std::string message;
    Library* library =
        compile_library(text_of(source), options ? options->options : metalsim::CompileOptions{}, message);
    if (!library) {
        give_error(error, library_domain, compile_failure, message);
        return nullptr;
    }
    auto* l = make<MetalLibrary>("MTLLibrary");
    l->library = library;
    return l;
}

Function* new_function(MetalLibrary* l, const std::string& name, FunctionConstants* constants,
                       Error** error) {
    const KernelInfo* kernel = l->library->find(name);
    if (!kernel || faults::strike("function")) {
        give_error(error, library_domain, function_not_found, "the library has no function '" + name + "'");
        return nullptr;
    }
    auto* f = make<Function>("MTLFunction");
    f->label = name;
    f->pipeline = {l->library, kernel, {}, kernel->max_threads};
    if (!constants) return f;
    f->pipeline.constants = constants->values;
    for (const auto& named : constants->named)
        if (const FunctionConstant* c = l->library->constant(named.name))
            f->pipeline.constants.push_back({c->index, named.value});
    return f;
}

PipelineState* new_pipeline(Function* f, unsigned long max_threads, Error** error) {
    if (!f) misuse("newComputePipelineState without a function");
    const KernelInfo& kernel = *f->pipeline.kernel;
    uint32_t memory = static_threadgroup_memory(kernel);
    if (faults::strike("pipeline")) {
        give_error(error, "CompilerError", 2,
                   "injected fault: the pipeline of '" + f->label + "' does not compile");
        return nullptr;
    }
    if (memory > config().max_threadgroup_memory) {
        give_error(error, "CompilerError", 2,
                   "Threadgroup memory size (" + std::to_string(memory) + ") of '" + f->label +
                       "' exceeds the maximum threadgroup memory allowed (" +
                       std::to_string(config().max_threadgroup_memory) + ")");
        return nullptr;
    }
    auto* p = make<PipelineState>("MTLComputePipelineState");
    p->label = f->label;
    p->pipeline = f->pipeline;
    if (max_threads)
        p->pipeline.max_threads = std::min<uint32_t>(p->pipeline.max_threads, uint32_t(max_threads));
    return p;
}

// MTLBinding of one parameter of a kernel.
struct KernelBinding : Object {
    ParameterInfo info;
};
struct Reflection : Object {
    Array* bindings = nullptr;
    void finish() { release(bindings); }
};

bool is_bound(const ParameterInfo& info) { return info.kind != ParameterKind::builtin; }

Reflection* new_reflection(const KernelInfo& kernel) {
    std::vector<Object*> bindings;
    for (size_t i = 0; i < kernel.parameter_count; i++) {
        if (!is_bound(kernel.parameters[i])) continue;
        auto* b = make<KernelBinding>("MTLBinding");
        b->info = kernel.parameters[i];
        bindings.push_back(b);
    }
    auto* r = make<Reflection>("MTLComputePipelineReflection");
    r->bindings = new_array(std::move(bindings));
    return r;
}

PipelineState* new_reflected_pipeline(Function* f, unsigned long max_threads, unsigned long options,
                                      Object** reflection, Error** error) {
    constexpr unsigned long binding_info = 1;
    PipelineState* p = new_pipeline(f, max_threads, error);
    if (reflection)
        *reflection =
            p && (options & binding_info) ? autoreleased(new_reflection(*f->pipeline.kernel)) : nullptr;
    return p;
}

void declare_reflection() {
    const char* R = "MTLComputePipelineReflection";
    declare_class<Reflection>(R);
    method(R, "bindings", [](Reflection* r, SEL) { return r->bindings; });
    const char* B = "MTLBinding";
    declare_class<KernelBinding>(B);
    method(B, "index", [](KernelBinding* b, SEL) { return static_cast<unsigned long>(b->info.index); });
    method(B, "type",
           [](KernelBinding* b, SEL) { return b->info.kind == ParameterKind::threadgroup_memory ? 1l : 0l; });
    method(B, "access", [](KernelBinding* b, SEL) { return b->info.is_const ? 0ul : 1ul; });
    // Whether an optional one is used depends on function constants.
    method(B, "isUsed", [](KernelBinding* b, SEL) { return b->info.kind != ParameterKind::optional_buffer; });
    method(B, "bufferDataSize",
           [](KernelBinding* b, SEL) { return static_cast<unsigned long>(b->info.element_size); });
}

void declare_options() {
    const char* O = "MTLCompileOptions";
    declare_class<CompileOptions>(O);
    method(O, "setLanguageVersion:", [](CompileOptions* o, SEL, unsigned long v) {
        o->options.language = language_name(v);
    });
    method(O, "setMathMode:", [](CompileOptions* o, SEL, long m) {
        o->math_mode = static_cast<unsigned long>(m);
    });
    method(O, "mathMode", [](CompileOptions* o, SEL) { return static_cast<long>(o->math_mode); });
    method(O, "setFastMathEnabled:", [](CompileOptions* o, SEL, bool f) { o->fast_math = f; });
    method(O, "fastMathEnabled", [](CompileOptions* o, SEL) { return o->fast_math; });
    method(O, "setMathFloatingPointFunctions:", [](CompileOptions*, SEL, long) {});
    method(O, "setOptimizationLevel:", [](CompileOptions*, SEL, long) {});
    method(O, "setPreserveInvariance:", [](CompileOptions*, SEL, bool) {});
    method(O, "setEnableLogging:", [](CompileOptions*, SEL, bool) {});
    method(O, "setMaxTotalThreadsPerThreadgroup:", [](CompileOptions* o, SEL, unsigned long n) {
        o->max_threads = n;
    });
    method(O, "setPreprocessorMacros:", [](CompileOptions* o, SEL, Dictionary* macros) {
        o->options.macros.clear();
        if (!macros) return;
        for (auto& [name, value] : macros->entries) {
            bool number = value->isa->name == "NSNumber";
            std::string text =
                number ? std::to_string(long(static_cast<Number*>(value)->value)) : text_of(value);
            o->options.macros.push_back(name + "=" + text);
        }
    });

    const char* C = "MTLFunctionConstantValues";
    declare_class<FunctionConstants>(C);
    method(C, "setConstantValue:type:atIndex:",
           [](FunctionConstants* f, SEL, const char* v, unsigned long type, unsigned long i) {
               f->values.push_back({int(i), std::vector<char>(v, v + size_of_type(type))});
           });
    method(C, "setConstantValues:type:withRange:",
           [](FunctionConstants* f, SEL, const char* v, unsigned long type, Range range) {
               size_t n = size_of_type(type);
               for (unsigned long i = 0; i < range.length; i++, v += n)
                   f->values.push_back({int(range.location + i), std::vector<char>(v, v + n)});
           });
    method(C, "setConstantValue:type:withName:",
           [](FunctionConstants* f, SEL, const char* v, unsigned long type, Object* name) {
               f->named.push_back({text_of(name), std::vector<char>(v, v + size_of_type(type))});
           });
    method(C, "reset", [](FunctionConstants* f, SEL) {
        f->values.clear();
        f->named.clear();
    });
}

void declare_pipelines() {
    const char* D = "MTLComputePipelineDescriptor";
    declare_class<PipelineDescriptor>(D);
    method(D, "setComputeFunction:", [](PipelineDescriptor* d, SEL, Function* f) {
        retain(f);
        release(d->function);
        d->function = f;
    });
    method(D, "computeFunction", [](PipelineDescriptor* d, SEL) { return d->function; });
    method(D, "setLabel:", [](PipelineDescriptor* d, SEL, Object* label) { d->label = text_of(label); });
    method(D, "setMaxTotalThreadsPerThreadgroup:", [](PipelineDescriptor* d, SEL, unsigned long n) {
        d->max_threads = n;
    });
    method(D, "setThreadGroupSizeIsMultipleOfThreadExecutionWidth:",
           [](PipelineDescriptor* d, SEL, bool whole) { d->whole_simdgroups = whole; });
    method(D, "setSupportIndirectCommandBuffers:", [](PipelineDescriptor*, SEL, bool) {});

    const char* P = "MTLComputePipelineState";
    declare_class<PipelineState>(P);
    method(P, "maxTotalThreadsPerThreadgroup", [](PipelineState* p, SEL) {
        const Pipeline& pipeline = p->pipeline;
        return static_cast<unsigned long>(config().max_threads(pipeline.kernel->name, pipeline.max_threads));
    });
    method(P, "threadExecutionWidth",
           [](PipelineState*, SEL) { return static_cast<unsigned long>(simd_width); });
    method(P, "staticThreadgroupMemoryLength", [](PipelineState* p, SEL) {
        return static_cast<unsigned long>(static_threadgroup_memory(*p->pipeline.kernel));
    });
    method(P, "label", [](PipelineState* p, SEL) { return autoreleased(new_string(p->label)); });
    method(P, "device", [](PipelineState*, SEL) { return system_device(); });
}

}  // namespace

void declare_library() {
    declare_options();
    declare_pipelines();
    declare_reflection();
    const char* D = "MTLDevice";
    method(D, "newLibraryWithSource:options:error:",
           [](Device*, SEL, Object* s, CompileOptions* o, Error** e) { return new_library(s, o, e); });
    method(D, "newLibraryWithSource:options:completionHandler:",
           [](Device*, SEL, Object* s, CompileOptions* o, const void* block) {
               Closure<MetalLibrary*, Error*> handler(block);
               retain(s);
               retain(o);
               std::thread([=] {
                   PoolScope pool;
                   Error* error = nullptr;
                   MetalLibrary* library = new_library(s, o, &error);
                   handler(library, error);
                   release(library);
                   release(s);
                   release(o);
               }).detach();
           });
    method(D, "newComputePipelineStateWithFunction:error:", [](Device*, SEL, Function* f, Error** e) {
        return new_pipeline(f, 0, e);
    });
    method(D, "newComputePipelineStateWithFunction:options:reflection:error:",
           [](Device*, SEL, Function* f, unsigned long options, Object** reflection, Error** e) {
               return new_reflected_pipeline(f, 0, options, reflection, e);
           });
    method(D, "newComputePipelineStateWithDescriptor:options:reflection:error:",
           [](Device*, SEL, PipelineDescriptor* d, unsigned long options, Object** reflection, Error** e) {
               PipelineState* p = new_reflected_pipeline(d->function, d->max_threads, options, reflection, e);
               if (p && !d->label.empty()) p->label = d->label;
               return p;
           });

    const char* L = "MTLLibrary";
    declare_class<MetalLibrary>(L);
    method(L, "newFunctionWithName:", [](MetalLibrary* l, SEL, Object* name) {
        return new_function(l, text_of(name), nullptr, nullptr);
    });
    method(L, "newFunctionWithName:constantValues:error:",
           [](MetalLibrary* l, SEL, Object* name, FunctionConstants* c, Error** e) {
               return new_function(l, text_of(name), c, e);
           });
    method(L, "functionNames", [](MetalLibrary* l, SEL) {
        std::vector<Object*> names;
        for (const KernelInfo& k : l->library->kernels) names.push_back(new_string(k.name));
        return autoreleased(new_array(std::move(names)));
    });
    method(L, "label", [](MetalLibrary* l, SEL) { return autoreleased(new_string(l->label)); });
    method(L, "setLabel:", [](MetalLibrary* l, SEL, Object* label) { l->label = text_of(label); });
    method(L, "device", [](MetalLibrary*, SEL) { return system_device(); });

    const char* F = "MTLFunction";
    declare_class<Function>(F);
    method(F, "name", [](Function* f, SEL) { return autoreleased(new_string(f->pipeline.kernel->name)); });
    method(F, "label", [](Function* f, SEL) { return autoreleased(new_string(f->label)); });
    method(F, "setLabel:", [](Function* f, SEL, Object* label) { f->label = text_of(label); });
    method(F, "functionType", [](Function*, SEL) { return 3ul; });
}

}  // namespace metalsim::objc
