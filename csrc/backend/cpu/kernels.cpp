#include "backend/cpu/kernels.h"

namespace lily::cpu {

#if defined(LILY_X86_KERNELS)
namespace avx512vnni {
extern const Kernels kTable;
}
namespace avxvnni {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
#endif
namespace generic {
extern const Kernels kTable;
}

namespace {

#if defined(LILY_X86_KERNELS)
bool has_avx512vnni() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
bool has_avxvnni() { return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("fma"); }
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

}  // namespace

const Kernels* find_kernels(const std::string& name) {
#if defined(LILY_X86_KERNELS)
    if ((name.empty() || name == "avx512vnni") && has_avx512vnni()) return &avx512vnni::kTable;
    if ((name.empty() || name == "avxvnni") && has_avxvnni()) return &avxvnni::kTable;
    if ((name.empty() || name == "avx2") && has_avx2()) return &avx2::kTable;
#endif
    if (name.empty() || name == "generic") return &generic::kTable;
    return nullptr;
}

}  // namespace lily::cpu
