// Gated attention of a prefill chunk by tensor operations (Metal 4): attention_prefill.metal for M5.
//
// attend_rows  formula, bindings, structure, tiles and splits of attention_prefill.metal, which has
//              join_splits.
//              Launch: (kv_heads * ceil(group / pack), ceil(rows / rows of a tile), splits) threadgroups of
//              128 threads.
// Two pages, 128 positions, are a step. A simdgroup has all rows and 32 of the positions for the scores, then
// all rows and D / 4 of the dimensions for the sum of values; queries and weights are the left operands, from
// threadgroup memory, keys [D, 64] and values [64, D] the right ones, from the cache as they lie, each read
// once. Weights are rounded to the activations' type, and the total is of the rounded ones. Head sizes 128
// (bf16 activations only: tiles of fp32 are too large) and 256; others run through attention_prefill.metal.
// Needs macOS 26.2, relies on the lane map of fragments.
// A row's bits depend neither on the rows and heads that share its tile nor on the chunk.
// Bound: multiply-adds of the matrix units; K and V once per tile from the caches.
#include "common/attention_rows.h"
#include "common/tensor_fragments.h"

constant constexpr const uint kPositions = 128u;     // of a step
constant constexpr const uint kOwnPositions = 32u;   // of a simdgroup
constant constexpr const uint kWeightStride = 136u;  // of a row of weights, against bank conflicts

// The maximum and the sum over the lanes of a row, in all of them.
inline float tensor_row_max(float value) {
    value = max(value, simd_shuffle_xor(value, ushort(1)));
    return max(value, simd_shuffle_xor(value, ushort(8)));
}

inline float tensor_row_sum(float value) {
    value = value + simd_shuffle_xor(value, ushort(1));
    return value + simd_shuffle_xor(value, ushort(8));
}

template <typename Cached, int D>
[[kernel, max_total_threads_per_threadgroup(128)]] void attend_rows(
    device const Activation* projected [[buffer(0)]], device const uint* positions [[buffer(1)]],
    device const uint* pages [[buffer(2)]], device const Cached* cache [[buffer(3)]],
    device Activation* out [[buffer(4)]], device float* partial [[buffer(5)]],
    device float2* statistics [[buffer(6)]], constant AttentionRowsShape& shape [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr int kEights = row_fragments<D>();
    constexpr int kFragments = kEights / 2;  // of 16 rows
    constexpr int kOwn = D / 128;            // times 32 dimensions of a simdgroup
    constexpr uint kRows = 8u * uint(kEights);
    constexpr uint kStride = uint(D) + 16u / uint(sizeof(Activation));
    constexpr uint kQueries = kRows * kStride / 4u;
    constexpr uint kWeights = kRows * kWeightStride / 4u;
    constexpr uint kStatistics = 4u * kRows;
    threadgroup vec<Activation, 4> query_vectors[kQueries];
    threadgroup vec<Activation, 4> weight_vectors[kWeights];
    threadgroup float tops[kStatistics];  // of four simdgroups
    threadgroup float totals[kStatistics];
    threadgroup float2 kept_statistics[kRows];  // over the splits so far
    threadgroup Activation* queries = (threadgroup Activation*)query_vectors;
    threadgroup Activation* weights = (threadgroup Activation*)weight_vectors;
    const uint per_kv = shape.heads / shape.kv_heads;
    const uint packs = (per_kv + shape.pack - 1u) / shape.pack;
    const uint kv_head = group.x / packs;
    const uint first_head = group.x % packs * shape.pack;  // within the KV head
    const uint tile_rows = kRows / shape.pack;
    const uint first_row = (groups.y - 1u - group.y) * tile_rows;
    const uint own_rows = min(tile_rows, shape.rows - first_row);
    const uint first_position = positions[0] + first_row;
    const uint length = first_position + own_rows;
    const uint end_page = (length + kPage - 1u) / kPage;
    const bool walks = shape.splits == 1u;
    uint first_page = group.z * shape.split_pages;
    if (first_page >= end_page) return;
    for (uint i = index; i < kRows * uint(D); i += kThreads) {
        const uint r = i / uint(D);
        const uint d = i % uint(D);
        const uint own_row = min(r / shape.pack, own_rows - 1u);
        const uint head = kv_head * per_kv + min(first_head + r % shape.pack, per_kv - 1u);
        queries[r * kStride + d] = projected[(first_row + own_row) * shape.stride + head * uint(2 * D) + d];
    }
    const uint row = tensor_row(lane);
    const uint column = tensor_column(lane);
    const uint head_offset = shape.layer_offset + kv_head * (2u * kPage * uint(D));
    const float scale = kLog2e / sqrt(float(D));
    uint position[kEights];
#pragma clang loop unroll(full)
    for (int g = 0; g < kEights; ++g) {
        position[g] = first_position + min((8u * uint(g) + row) / shape.pack, own_rows - 1u);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (bool more = true; more; first_page += shape.split_pages) {
        const uint last_page = min(first_page + shape.split_pages, end_page);
        const uint end = min(length, last_page * kPage);  // of the positions
        more = walks && last_page < end_page;
        float top[kEights];
        float total[kEights];  // over the columns of this lane
        float acc[kFragments * kOwn * 16];
#pragma clang loop unroll(full)
        for (int g = 0; g < kEights; ++g) {
            top[g] = -INFINITY;
            total[g] = 0.0f;
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < kFragments * kOwn * 16; ++i) acc[i] = 0.0f;
        for (uint page = first_page; page < last_page; page += 2u) {
            const uint begin = page * kPage;
            const uint count = min(kPositions, end - begin);
            const bool masked = begin + kPositions > min(first_position + 1u, end);
            const uint own_begin = begin + kOwnPositions * simdgroup;
            float score[kFragments * 16];
#pragma clang loop unroll(full)
            for (int i = 0; i < kFragments * 16; ++i) score[i] = 0.0f;
            if (own_begin < end) {
                device const Cached* keys = cache +
                                            ulong(pages[own_begin / kPage]) * ulong(shape.page_stride) +
                                            head_offset + row * kPage + own_begin % kPage + column;
#pragma clang loop unroll_count(2)
                for (uint d = 0u; d < uint(D); d += 16u) {
                    Activation k[16];
#pragma clang loop unroll(full)
                    for (int i = 0; i < 4; ++i) {
                        device const Cached* at = keys + (d + 8u * uint(i % 2)) * kPage + 16u * uint(i / 2);
                        take_four(*(device const vec<Cached, 4>*)at, k + 4 * i);
                    }
#pragma clang loop unroll(full)
                    for (int f = 0; f < kFragments; ++f) {
                        Activation q[8];
#pragma clang loop unroll(full)
                        for (int i = 0; i < 2; ++i) {
                            threadgroup const Activation* at =
                                queries + (16u * uint(f) + 8u * uint(i) + row) * kStride + d + column;
                            take_four(*(threadgroup const vec<Activation, 4>*)at, q + 4 * i);
                        }
                        multiply_fragments<false>(q, k, score + 16 * f);
                    }
                }
            }
            // Elements of row 8 g + row: four of each of two fragments.
#pragma clang loop unroll(full)
            for (int g = 0; g < kEights; ++g) {
                float peak = -INFINITY;
#pragma clang loop unroll(full)
                for (int e = 0; e < 8; ++e) {
                    const int at = 16 * (g / 2) + 8 * (e / 4) + 4 * (g % 2) + e % 4;
                    score[at] *= scale;
                    if (masked) {
                        const uint place = own_begin + 16u * uint(e / 4) + column + uint(e % 4);
                        score[at] = place <= position[g] && place < end ? score[at] : -INFINITY;
                    }
                    peak = max(peak, score[at]);
                }
                peak = tensor_row_max(peak);
                if ((lane & 9u) == 0u) tops[simdgroup * kRows + 8u * uint(g) + row] = peak;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float kept[kEights];
#pragma clang loop unroll(full)
            for (int g = 0; g < kEights; ++g) {
                const uint r = 8u * uint(g) + row;
                float peak = top[g];
#pragma clang loop unroll(full)
                for (uint s = 0u; s < 4u; ++s) peak = max(peak, tops[s * kRows + r]);
                const float finite =
                    peak == -INFINITY ? 0.0f : peak;  // a row may have no position in a split
                kept[g] = exp2(top[g] - finite);
                top[g] = peak;
                float sum = 0.0f;
#pragma clang loop unroll(full)
                for (int e = 0; e < 8; ++e) {
                    const int at = 16 * (g / 2) + 8 * (e / 4) + 4 * (g % 2) + e % 4;
                    const Activation w = Activation(exp2(score[at] - finite));
                    weights[r * kWeightStride + kOwnPositions * simdgroup + 16u * uint(e / 4) + column +
                            uint(e % 4)] = w;
                    sum += float(w);
                }
                total[g] = fma(total[g], kept[g], sum);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
            for (int i = 0; i < kFragments * kOwn * 16; ++i) acc[i] *= kept[i / (kOwn * 16) * 2 + i % 8 / 4];
            for (uint k = 0u; k < count; k += 16u) {
                device const Cached* values =
                    cache + ulong(pages[(begin + k) / kPage]) * ulong(shape.page_stride) + head_offset +
                    kPage * uint(D) + k % kPage * uint(D) + simdgroup * uint(D / 4) + column;
                Activation w[kFragments * 8];
#pragma clang loop unroll(full)
                for (int i = 0; i < kEights; ++i) {
                    threadgroup const Activation* at =
                        weights + (8u * uint(i) + row) * kWeightStride + k + column;
                    take_four(*(threadgroup const vec<Activation, 4>*)at, w + 4 * i);
                }
#pragma clang loop unroll(full)
                for (int o = 0; o < kOwn; ++o) {
                    Activation v[16];
#pragma clang loop unroll(full)
                    for (int i = 0; i < 4; ++i) {
                        // What lies beyond the end was never written and may be NaN.
                        const uint r = row + 8u * uint(i % 2);
                        const bool inside = k + r < count;
                        device const Cached* at =
                            values + (inside ? r : 0u) * uint(D) + 32 * o + 16 * (i / 2);
                        take_four(*(device const vec<Cached, 4>*)at, v + 4 * i);
#pragma clang loop unroll(full)
                        for (int j = 0; j < 4; ++j) v[4 * i + j] = inside ? v[4 * i + j] : Activation(0.0f);
                    }
#pragma clang loop unroll(full)
                    for (int f = 0; f < kFragments; ++f) {
                        multiply_fragments<false>(w + 8 * f, v, acc + (f * kOwn + o) * 16);
                    }
                }
            }
        }
#pragma clang loop unroll(full)
        for (int g = 0; g < kEights; ++g) {
            const float sum = tensor_row_sum(total[g]);
            if ((lane & 9u) == 0u) totals[simdgroup * kRows + 8u * uint(g) + row] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool merges = walks && first_page != 0u;
        float2 all[kEights];
        float2 factors[kEights];
#pragma clang loop unroll(full)
        for (int g = 0; g < kEights; ++g) {
            const uint r = 8u * uint(g) + row;
            const float2 own = float2(
                top[g], (totals[r] + totals[kRows + r]) + (totals[2u * kRows + r] + totals[3u * kRows + r]));
            all[g] = merges ? kept_statistics[r] : own;
            factors[g] = float2(0.0f);
            if (merges && position[g] >= first_page * kPage) factors[g] = merge(all[g], own);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (int g = 0; g < kEights; ++g) {
            const uint r = 8u * uint(g) + row;
            if (simdgroup == 0u && column == 0u) kept_statistics[r] = all[g];
            const uint own_row = r / shape.pack;
            const uint own_head = first_head + r % shape.pack;
            if (own_row >= own_rows || own_head >= per_kv) continue;
            const uint head = kv_head * per_kv + own_head;
            const uint at = (first_row + own_row) * shape.heads + head;
            const uint cell = at * shape.splits + group.z;
            device const Activation* gates =
                projected + (first_row + own_row) * shape.stride + head * uint(2 * D) + uint(D);
#pragma clang loop unroll(full)
            for (int i = 0; i < kOwn * 8; ++i) {
                const int o = i / 8;
                const int e = i % 8;
                float y = acc[(g / 2 * kOwn + o) * 16 + 8 * (e / 4) + 4 * (g % 2) + e % 4];
                const uint d = simdgroup * uint(D / 4) + uint(32 * o + 16 * (e / 4) + e % 4) + column;
                device float* kept_sum = partial + cell * uint(D) + d;
                if (merges) {
                    const bool inside = position[g] >= first_page * kPage;
                    y = inside ? merged(*kept_sum, y, factors[g]) : *kept_sum;
                }
                if (walks && !more) {
                    out[at * uint(D) + d] = Activation(y / all[g].y * sigmoid(float(gates[d])));
                } else {
                    *kept_sum = y;
                }
            }
            if (!walks && simdgroup == 0u && column == 0u) statistics[cell] = all[g];
        }
    }
}

#define LILY_ATTEND_ROWS(cached, dim)                                   \
    template [[host_name("attend_rows_" #cached "_d" #dim)]] [[kernel]] \
    decltype(attend_rows<cached, dim>) attend_rows<cached, dim>;

LILY_ATTEND_ROWS(bfloat, 128)
LILY_ATTEND_ROWS(bfloat, 256)
LILY_ATTEND_ROWS(float, 256)
