#include <metal_stdlib>
using namespace metal;
constant constexpr uint kRows = 4u;
constexpr uint product(uint a, uint b) { return a * b; }
template <uint M>
kernel void k(device float* a [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float one[(M + 1u) * 2u];
    threadgroup float two[kRows][(M > 2u ? M : 2u)];
    threadgroup float three[product(M, 2u)];
    one[i] = 1.0f;
    two[0][i] = 2.0f;
    three[i] = 3.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    a[i] = one[i] + two[0][i] + three[i];
}
template [[host_name("k")]] [[kernel]] decltype(k<4u>) k<4u>;
