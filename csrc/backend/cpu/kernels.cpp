#include "backend/cpu/kernels.h"

#if defined(LILY_NEON_KERNELS) && defined(__linux__)
#include <sys/auxv.h>
#endif

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
#elif defined(LILY_NEON_KERNELS)
namespace neon {
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
#elif defined(LILY_NEON_KERNELS)
bool has_neon_dot_products() {
#if defined(__linux__)
    constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
    return true;  // every Apple processor of this architecture that runs macOS
#endif
}
#endif

}  // namespace

const Kernels* find_kernels(const std::string& name) {
#if defined(LILY_X86_KERNELS)
    if ((name.empty() || name == "avx512vnni") && has_avx512vnni()) return &avx512vnni::kTable;
    if ((name.empty() || name == "avxvnni") && has_avxvnni()) return &avxvnni::kTable;
    if ((name.empty() || name == "avx2") && has_avx2()) return &avx2::kTable;
#elif defined(LILY_NEON_KERNELS)
    if ((name.empty() || name == "neon") && has_neon_dot_products()) return &neon::kTable;
#endif
    if (name.empty() || name == "generic") return &generic::kTable;
    return nullptr;
}

}  // namespace lily::cpu
