// How the numbers of a weight matrix are written, and their reader: every format in chunks of 32 columns.
//
// Format   b2 .. b8  affine, w = s q + b, unsigned codes of 2, 3, 4, 5, 6 or 8 bits, a little-endian bit
// stream
//          b16, f16, f32  plain bf16, fp16, fp32
//          mxfp4, mxfp8   w = 2^(s - 127) v, v an e2m1 or e4m3 number, a scale per 32 (OCP Microscaling 1.0)
//          nvfp4          w = e4m3(s) v, v an e2m1 number, a scale per 16
// decode() gives each number times a power of two that depends on its column alone; code_weight() undoes it
// on the side of the input. Both are exact:
//   codes stay where they lie in 16 bits (4, 8 bits) or in the bits of four codes (2, 3, 5, 6: at most 24),
//   e2m1 and e4m3 get the exponent and the mantissa of a half with the same bits, 2^-14 or 2^-8 of the number
//   (subnormals too: a half has them).
#pragma once
#include "common/numbers.h"

enum class Format : int { b2 = 2, b3, b4, b5, b6, b8 = 8, b16, f16, f32, mxfp4, mxfp8, nvfp4 };

// The less clever path, for comparison (metal/ablation/one_row_*.metal): a simdgroup has one weight row, and
// codes are shifted to their place.
#ifdef LILY_ONE_ROW
constant constexpr const bool kOneRow = true;
#else
constant constexpr const bool kOneRow = false;
#endif

constant constexpr const uint kChunk = 32u;

constexpr bool is_affine(Format f) { return f <= Format::b8; }
constexpr bool is_plain(Format f) { return f == Format::b16 || f == Format::f16 || f == Format::f32; }

// 32-bit words of a chunk.
constexpr uint chunk_words(Format f) {
    return f == Format::f32 ? 32u : is_plain(f) ? 16u : is_affine(f) ? uint(f) : f == Format::mxfp8 ? 8u : 4u;
}

// Scales of a chunk: a plain one has none.
constexpr int chunk_scales(Format f) { return is_plain(f) ? 0 : f == Format::nvfp4 ? 2 : 1; }

// A chunk is loaded in pieces, so that fp32 weights of several rows don't fill the registers.
constexpr int chunk_pieces(Format f) { return f == Format::f32 ? 4 : 1; }
constexpr int piece_words(Format f) { return int(chunk_words(f)) / chunk_pieces(f); }
constexpr int piece_steps(Format f) { return 8 / chunk_pieces(f); }  // of four columns

// Words of one piece of a chunk, by the widest loads that its alignment allows.
template <Format F>
inline void load_piece(device const uint* chunk, int piece, thread uint* words) {
    constexpr int kWords = piece_words(F);
    device const uint* from = chunk + piece * kWords;
    if (kWords % 4 == 0) {
#pragma clang loop unroll(full)
        for (int i = 0; i < kWords / 4; ++i) {
            const uint4 four = ((device const uint4*)from)[i];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    } else if (kWords % 2 == 0) {
#pragma clang loop unroll(full)
        for (int i = 0; i < kWords / 2; ++i) {
            const uint2 two = ((device const uint2*)from)[i];
            words[2 * i] = two.x;
            words[2 * i + 1] = two.y;
        }
    } else {
#pragma clang loop unroll(full)
        for (int i = 0; i < kWords; ++i) words[i] = from[i];
    }
}

// e4m3 in the upper byte of 16 bits, times 2^-8; all ones is NaN.
inline float small_float(uint bits) {
    const float value = float(as_type<half>(ushort((bits & 0x8000u) | ((bits >> 1) & 0x3f80u))));
    return (bits & 0x7f00u) == 0x7f00u ? as_type<float>(0x7fc00000u) : value;
}

// 2^-(position of the code of a column), or what a small float lacks to its number.
template <Format F>
inline float code_weight(uint column) {
    if (is_plain(F) || (kOneRow && is_affine(F))) return 1.0f;
    if (F == Format::mxfp8) return 256.0f;
    if (!is_affine(F)) return 16384.0f;
    const uint together = F == Format::b8 ? 2u : 4u;
    return as_type<float>((127u - uint(F) * (column % together)) << 23);
}

// Numbers 4 i .. 4 i + 3 of a piece, each over its code_weight().
template <Format F>
inline float4 decode(thread const uint* words, int i) {
    if (F == Format::b4 && !kOneRow) {
        const ushort2 pair = as_type<ushort2>(words[i / 2]);
        const ushort w = i % 2 == 0 ? pair.x : pair.y;
        return float4(float(ushort(w & 0x000f)), float(ushort(w & 0x00f0)), float(ushort(w & 0x0f00)),
                      float(ushort(w & 0xf000)));
    }
    if (F == Format::b8 && !kOneRow) {
        const ushort2 pair = as_type<ushort2>(words[i]);
        return float4(float(ushort(pair.x & 0x00ff)), float(ushort(pair.x & 0xff00)),
                      float(ushort(pair.y & 0x00ff)), float(ushort(pair.y & 0xff00)));
    }
    if (is_affine(F)) {
        constexpr uint kBits = is_affine(F) ? uint(F) : 1u;
        constexpr uint kMask = (1u << kBits) - 1u;
        const uint bit = 4u * kBits * uint(i);
        const uint shift = bit % 32u;
        uint w = words[bit / 32u] >> shift;
        if (shift + 4u * kBits > 32u) w |= words[bit / 32u + 1u] << (32u - shift);
        if (kOneRow) {
            return float4(float(w & kMask), float((w >> kBits) & kMask), float((w >> (2u * kBits)) & kMask),
                          float((w >> (3u * kBits)) & kMask));
        }
        return float4(float(w & kMask), float(w & (kMask << kBits)), float(w & (kMask << (2u * kBits))),
                      float(w & (kMask << (3u * kBits))));
    }
    if (F == Format::b16) {
        const uint a = words[2 * i];
        const uint b = words[2 * i + 1];
        return float4(as_type<float>(a << 16), as_type<float>(a & 0xffff0000u), as_type<float>(b << 16),
                      as_type<float>(b & 0xffff0000u));
    }
    if (F == Format::f16) {
        const half2 a = as_type<half2>(words[2 * i]);
        const half2 b = as_type<half2>(words[2 * i + 1]);
        return float4(float(a.x), float(a.y), float(b.x), float(b.y));
    }
    if (F == Format::f32) {
        return float4(as_type<float>(words[4 * i]), as_type<float>(words[4 * i + 1]),
                      as_type<float>(words[4 * i + 2]), as_type<float>(words[4 * i + 3]));
    }
    if (F == Format::mxfp8) {
        const uint w = words[i];
        return float4(small_float(w << 8), small_float(w & 0xff00u), small_float(w >> 8),
                      small_float(w >> 16));
    }
    // e2m1: code j of the low half of a word and code j of the high half at once.
    float4 numbers;
    const uint w = words[i / 2];
#pragma clang loop unroll(full)
    for (int j = 0; j < 4; ++j) {
        const uint top = w << (12 - 4 * j);
        const half2 two = as_type<half2>((top & 0x80008000u) | ((top >> 3) & 0x0e000e00u));
        numbers[j] = i % 2 == 0 ? float(two.x) : float(two.y);
    }
    return numbers;
}

// A stored scale as a number.
template <Format F>
inline float scale_value(Scale stored) {
    static_assert(is_plain(F) || is_affine(F) == (sizeof(Scale) > 1), "LILY_SCALE is uchar for mx and nv");
    if (is_affine(F)) return float(stored);
    const uint bits = uint(stored);
    if (F == Format::nvfp4) return 256.0f * small_float(bits << 8);
    return as_type<float>(bits == 255u ? 0x7fc00000u : bits == 0u ? 0x00400000u : bits << 23);
}

// Kernels are made for the format of -D LILY_FORMAT=b6, or for the three that checkpoints mix most.
#ifdef LILY_FORMAT
#define LILY_EACH_FORMAT(kernels) kernels(LILY_FORMAT)
#else
#define LILY_EACH_FORMAT(kernels) kernels(b4) kernels(b8) kernels(b16)
#endif
