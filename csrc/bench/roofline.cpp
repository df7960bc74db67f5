#include "bench/roofline.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>

#include "base/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lily::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Independent sums: enough to hide a latency of eight cycles at two instructions a cycle.
constexpr int kSums = 16;
constexpr int64_t kRounds = 100'000;               // of kSums instructions, between looks at the clock
constexpr int64_t kPieceBytes = int64_t{1} << 21;  // read between looks at the clock

struct Unit {
    DotUnit described;
    void (*run)(int64_t rounds);  // kSums instructions a round
};

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void run_vfmadd_512(int64_t rounds) {
    const __m512 x = _mm512_set1_ps(0.5f);
    __m512 sums[kSums] = {};
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[k]) : "v"(x));
    }
}

__attribute__((target("avx512f"))) void run_vpdpbusd_512(int64_t rounds) {
    const __m512i x = _mm512_set1_epi8(3);
    __m512i sums[kSums] = {};
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[k]) : "v"(x));
    }
}

__attribute__((target("avx512f"))) void run_vpdpwssd_512(int64_t rounds) {
    const __m512i x = _mm512_set1_epi16(3);
    __m512i sums[kSums] = {};
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) asm volatile("vpdpwssd %1, %1, %0" : "+v"(sums[k]) : "v"(x));
    }
}

__attribute__((target("avx512f"))) void run_vdpbf16ps_512(int64_t rounds) {
    const __m512i x = _mm512_set1_epi16(0x3f00);
    __m512 sums[kSums] = {};
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sums[k]) : "v"(x));
    }
}

// 256 bits have 16 registers: 12 sums leave room for the operands.
constexpr int kSums256 = 12;

__attribute__((target("avx2,fma"))) void run_vfmadd_256(int64_t rounds) {
    const __m256 x = _mm256_set1_ps(0.5f);
    __m256 sums[kSums256] = {};
    for (int64_t i = 0; i < rounds * kSums / kSums256; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums256; ++k) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(sums[k]) : "x"(x));
    }
}

// A product and the addition that it needs count as one instruction.
__attribute__((target("avx2"))) void run_vpmaddwd_256(int64_t rounds) {
    const __m256i x = _mm256_set1_epi16(3);
    __m256i sums[kSums256] = {};
    for (int64_t i = 0; i < rounds * kSums / kSums256; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums256; ++k) {
            __m256i products;
            asm volatile("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0"
                         : "+x"(sums[k]), "=&x"(products)
                         : "x"(x));
        }
    }
}

std::vector<Unit> units() {
    std::vector<Unit> found;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
        found.push_back({{"vfmadd-512", "fp32 multiply-add", 32}, run_vfmadd_512});
    }
    if (__builtin_cpu_supports("avx512bf16")) {
        found.push_back({{"vdpbf16ps-512", "bf16 products, fp32 sums", 64}, run_vdpbf16ps_512});
    }
    if (__builtin_cpu_supports("avx512vnni")) {
        found.push_back({{"vpdpwssd-512", "int16 products, int32 sums", 64}, run_vpdpwssd_512});
        found.push_back({{"vpdpbusd-512", "int8 products, int32 sums", 128}, run_vpdpbusd_512});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back({{"vfmadd-256", "fp32 multiply-add", 16}, run_vfmadd_256});
        found.push_back({{"vpmaddwd-256", "int16 products, int32 sums", 32}, run_vpmaddwd_256});
    }
    return found;
}

__attribute__((target("avx512f"))) uint64_t read_512(const char* data, int64_t bytes) {
    __m512i seen[4] = {};
    for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            seen[k] = _mm512_or_si512(seen[k], _mm512_load_si512(data + i + 64 * k));
        }
    }
    seen[0] = _mm512_or_si512(_mm512_or_si512(seen[0], seen[1]), _mm512_or_si512(seen[2], seen[3]));
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, seen[0]);
    return std::accumulate(lanes, lanes + 8, uint64_t{0}, std::bit_or<>{});
}

#elif defined(__aarch64__)

void run_fmla_128(int64_t rounds) {
    const float32x4_t x = vdupq_n_f32(0.5f);
    float32x4_t sums[kSums];
    for (float32x4_t& sum : sums) sum = vdupq_n_f32(0);
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) {
            asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(sums[k]) : "w"(x));
        }
    }
}

std::vector<Unit> units() { return {{{"fmla-128", "fp32 multiply-add", 8}, run_fmla_128}}; }

#else

std::vector<Unit> units() { return {}; }

#endif

// Plain words; compilers make vectors of them.
uint64_t read_words(const char* data, int64_t bytes) {
    uint64_t seen[8] = {};
    for (int64_t i = 0; i < bytes; i += 64) {
        for (int k = 0; k < 8; ++k) {
            uint64_t word;
            std::memcpy(&word, data + i + 8 * k, 8);
            seen[k] |= word;
        }
    }
    return std::accumulate(seen, seen + 8, uint64_t{0}, std::bit_or<>{});
}

uint64_t read(const char* data, int64_t bytes) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx512f");
    if (wide) return read_512(data, bytes);
#endif
    return read_words(data, bytes);
}

struct Unmap {
    size_t bytes;
    void operator()(char* data) const { munmap(data, bytes); }
};

// Zeroed memory that was touched, in large pages where the system has them.
std::unique_ptr<char, Unmap> make_buffer(int64_t bytes) {
    const auto size = static_cast<size_t>(bytes);
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw MemoryBudgetError("can't allocate " + std::to_string(bytes) + " bytes");
#if defined(MADV_HUGEPAGE)
    madvise(data, size, MADV_HUGEPAGE);
#endif
    std::memset(data, 1, size);
    return {static_cast<char*>(data), Unmap{size}};
}

// Runs work(thread), which returns the amount it did, again and again on each thread until `seconds` are
// over; the amount per second of all threads.
double measure(int threads, double seconds, const std::function<double(int)>& work) {
    std::atomic<int> ready{0};
    std::vector<double> rates(static_cast<size_t>(threads));
    const auto run = [&](int thread) {
        work(thread);  // wakes the unit, loads the caches
        ready.fetch_add(1);
        while (ready.load(std::memory_order_relaxed) < threads) std::this_thread::yield();
        const auto start = Clock::now();
        double done = 0;
        double passed = 0;
        do {
            done += work(thread);
            passed = std::chrono::duration<double>(Clock::now() - start).count();
        } while (passed < seconds);
        rates[static_cast<size_t>(thread)] = done / passed;
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
    run(0);
    for (std::thread& other : others) other.join();
    return std::accumulate(rates.begin(), rates.end(), 0.0);
}

void check(int threads, double seconds, int repeats) {
    if (threads < 1 || threads > 1024) {
        throw InvalidArgument("threads must be 1 to 1024, got " + std::to_string(threads));
    }
    if (!(seconds > 0) || repeats < 1) throw InvalidArgument("seconds and repeats must be positive");
}

}  // namespace

std::vector<DotUnit> dot_units() {
    std::vector<DotUnit> found;
    for (const Unit& unit : units()) found.push_back(unit.described);
    return found;
}

std::vector<double> measure_dot_products(const std::string& name, int threads, double seconds, int repeats) {
    check(threads, seconds, repeats);
    for (const Unit& unit : units()) {
        if (unit.described.name != name) continue;
        const double amount = static_cast<double>(kRounds * kSums * unit.described.operations);
        std::vector<double> rates;
        for (int i = 0; i < repeats; ++i) {
            rates.push_back(measure(threads, seconds, [&](int) {
                unit.run(kRounds);
                return amount;
            }));
        }
        return rates;
    }
    throw InvalidArgument("this CPU has no unit '" + name + "'");
}

std::vector<double> measure_read_bandwidth(int64_t bytes, int threads, double seconds, int repeats) {
    check(threads, seconds, repeats);
    const int64_t part = bytes / threads / 4096 * 4096;
    if (part < 4096) throw InvalidArgument("a thread must read 4096 bytes at least");
    const auto buffer = make_buffer(part * threads);
    std::vector<int64_t> positions(static_cast<size_t>(threads) * 8);  // a cache line each
    std::atomic<uint64_t> seen{0};
    std::vector<double> rates;
    for (int i = 0; i < repeats; ++i) {
        rates.push_back(measure(threads, seconds, [&](int thread) {
            int64_t& position = positions[static_cast<size_t>(thread) * 8];
            uint64_t bits = 0;
            for (int64_t left = kPieceBytes; left > 0;) {
                const int64_t count = std::min(left, part - position);
                bits |= read(buffer.get() + thread * part + position, count);
                position = (position + count) % part;
                left -= count;
            }
            seen.fetch_or(bits, std::memory_order_relaxed);
            return static_cast<double>(kPieceBytes);
        }));
    }
    if (seen.load() == 0) throw Error("the buffer read as zeros");
    return rates;
}

}  // namespace lily::bench
