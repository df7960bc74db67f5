// Philox4x32-10, a counter-based generator: 128 random bits from a counter and a key, no state. J. Salmon,
// M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11 (2011); the constants
// are theirs. Bound: arithmetic, 20 multiplications.
#pragma once
#include "common/numbers.h"

inline uint4 philox(uint4 counter, uint2 key) {
    for (int round = 0; round < 10; ++round) {
        const uint low0 = 0xd2511f53u * counter.x;
        const uint low2 = 0xcd9e8d57u * counter.z;
        const uint high0 = mulhi(0xd2511f53u, counter.x);
        const uint high2 = mulhi(0xcd9e8d57u, counter.z);
        counter = uint4(high2 ^ counter.y ^ key.x, low2, high0 ^ counter.w ^ key.y, low0);
        key = uint2(key.x + 0x9e3779b9u, key.y + 0xbb67ae85u);
    }
    return counter;
}
