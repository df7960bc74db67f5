#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = 1; }
template [[host_name("x")]] [[kernel]] decltype(k<float>) k<float>;
template [[host_name("x")]] [[kernel]] decltype(k<int>) k<int>;
