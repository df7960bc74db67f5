#include <metal_stdlib>
using namespace metal;
kernel void k(device ulong* a [[buffer(0)]], device long* b [[buffer(1)]]) {
    a[0] = 1ul << 40 | 0xFFUL;
    b[0] = 3l - 0x7L;
}
