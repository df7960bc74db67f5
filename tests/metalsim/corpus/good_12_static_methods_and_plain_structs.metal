#include <metal_stdlib>
using namespace metal;
struct S { float v; static float twice(float x) { return 2 * x; } };
template <typename T> struct Box { T v[2]; Box(T x) thread { v[0] = x; v[1] = x; } T sum() const thread { return v[0] + v[1]; } };
kernel void k(device float* a [[buffer(0)]]) { S s = {a[0]}; Box<float> b(s.v); a[1] = S::twice(s.v) + b.sum(); }
