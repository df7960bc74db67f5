#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* a [[buffer(0)]], device float2* b [[buffer(1)]]) {
    vec<float, 2> v = vec<float, 2>(1.0f, 2.0f);
    float2 w = float2(v);
    vec<float, 2> u = vec<float, 2>(w);
    float4 q = float4(v, w);
    b[0] = w + u + float2(half2(v)) + q.xy;
    a[0] = vec<T, 4>(q).x;
}
template [[host_name("k")]] [[kernel]] decltype(k<float>) k<float>;
