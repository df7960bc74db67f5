// Gated attention of a prefill chunk of one sequence over paged keys and values.
//
// attend_rows  out[row, head] = softmax(q k / sqrt(D)) v * sigmoid(gate) over the positions up to the row's.
//              A tile is `pack` query heads of a KV head times as many rows as make 32 (16 with fp32
//              activations and D = 256): keys and values are read once per KV head and tile. Scores never
//              leave registers; weights pass through threadgroup memory, since another simdgroup has the
//              values.
//              Launch: (kv_heads * ceil(group / pack), ceil(rows / rows of a tile), splits) threadgroups of
//              128 threads; group = heads / kv_heads, rows of a tile = 32 / pack (16 / pack), pack at most
//              group and 32 (16). Tiles run from the last row to the first: the longest begin.
//              Split s has pages [s split_pages, (s + 1) split_pages), and its own softmax. With splits = 1 a
//              threadgroup walks all of its tile's: what it has after each lies in partial [rows, heads, D]
//              until the next is merged into it. With splits > 1 each leaves partial [rows, heads, splits, D]
//              and statistics [rows, heads, splits] = (top, total) instead of out.
// join_splits  out from what splits > 1 left, merged as a walk does, to the same bits: for few rows and a
//              long context, where tiles alone don't fill the GPU.
//              Launch: (heads, rows) threadgroups of D threads.
//
// Rows must be rotated and in the cache (rotary_append): row i has position positions[0] + i. projected,
// cache and pages are those of attention.metal; `pages` begins at this sequence's table.
// A page of 64 positions is a step. A simdgroup has all rows and 16 of the positions for the scores (keys are
// stored [D, 64]: the right operand as they lie), then all rows and D / 4 of the dimensions for the sum of
// values. Masks are only made in pages that reach beyond the tile's first row. A row's bits depend neither on
// the rows and heads that share its tile nor on the chunk.
// Bound: multiply-adds of the matrix units; K and V once per tile from the caches.
#include "common/attention_rows.h"
#include "common/fragments.h"

constant constexpr const uint kWeightStride = 68u;  // of a row of weights, against bank conflicts

template <typename Cached, int D>
[[kernel, max_total_threads_per_threadgroup(128)]] void attend_rows(
    device const Activation* projected [[buffer(0)]], device const uint* positions [[buffer(1)]],
    device const uint* pages [[buffer(2)]], device const Cached* cache [[buffer(3)]],
    device Activation* out [[buffer(4)]], device float* partial [[buffer(5)]],
    device float2* statistics [[buffer(6)]], constant AttentionRowsShape& shape [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr int kRowFragments = row_fragments<D>();
    constexpr uint kRows = 8u * uint(kRowFragments);
    constexpr uint kStride = uint(D) + 16u / uint(sizeof(Activation));
    constexpr int kOwn = D / 32;  // eights of dimensions of a simdgroup
    constexpr uint kQueries = kRows * kStride;
    constexpr uint kWeights = kRows * kWeightStride / 2u;
    constexpr uint kStatistics = 4u * kRows;
    threadgroup Activation queries[kQueries];
    threadgroup float2 weight_pairs[kWeights];
    threadgroup float tops[kStatistics];  // of four simdgroups
    threadgroup float totals[kStatistics];
    threadgroup float2 kept_statistics[kRows];  // over the splits so far
    threadgroup float* weights = (threadgroup float*)weight_pairs;
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
    const uint row = fragment_row(lane);
    const uint column = fragment_column(lane);
    const float scale = kLog2e / sqrt(float(D));
    uint position[kRowFragments];
#pragma clang loop unroll(full)
    for (int i = 0; i < kRowFragments; ++i) {
        position[i] = first_position + min((8u * uint(i) + row) / shape.pack, own_rows - 1u);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (bool more = true; more; first_page += shape.split_pages) {
        const uint last_page = min(first_page + shape.split_pages, end_page);
        more = walks && last_page < end_page;
        float top[kRowFragments];
        float total[kRowFragments];  // over the columns of this lane
        Fragment acc[kRowFragments * kOwn];
#pragma clang loop unroll(full)
        for (int i = 0; i < kRowFragments; ++i) {
            top[i] = -INFINITY;
            total[i] = 0.0f;
#pragma clang loop unroll(full)
            for (int f = 0; f < kOwn; ++f) acc[i * kOwn + f] = fragment(0.0f, 0.0f);
        }
        for (uint page = first_page; page < last_page; ++page) {
            device const Cached* keys = cache + ulong(pages[page]) * ulong(shape.page_stride) +
                                        shape.layer_offset + kv_head * (2u * kPage * uint(D));
            device const Cached* values = keys + kPage * uint(D);
            const uint count = min(kPage, length - page * kPage);
            const bool masked = page * kPage + kPage > first_position + 1u;
            // Scores of 16 positions.
            Fragment score[kRowFragments * 2];
#pragma clang loop unroll(full)
            for (int i = 0; i < kRowFragments * 2; ++i) score[i] = fragment(0.0f, 0.0f);
            if (16u * simdgroup < count) {
                device const Cached* own_keys = keys + row * kPage + 16u * simdgroup + column;
#pragma clang loop unroll_count(4)
                for (uint d = 0u; d < uint(D); d += 8u) {
                    Fragment k[2];
#pragma clang loop unroll(full)
                    for (int j = 0; j < 2; ++j) {
                        const vec<Cached, 2> two =
                            *(device const vec<Cached, 2>*)(own_keys + d * kPage + 8 * j);
                        k[j] = fragment(float(two.x), float(two.y));
                    }
#pragma clang loop unroll(full)
                    for (int i = 0; i < kRowFragments; ++i) {
                        threadgroup const Activation* at =
                            queries + (8u * uint(i) + row) * kStride + d + column;
                        const Fragment q = fragment(float(at[0]), float(at[1]));
#pragma clang loop unroll(full)
                        for (int j = 0; j < 2; ++j) {
                            simdgroup_multiply_accumulate(score[2 * i + j], q, k[j], score[2 * i + j]);
                        }
                    }
                }
            }
            float2 scores[kRowFragments * 2];
#pragma clang loop unroll(full)
            for (int i = 0; i < kRowFragments; ++i) {
#pragma clang loop unroll(full)
                for (int j = 0; j < 2; ++j) {
                    float2 s = fragment_values(score[2 * i + j]) * scale;
                    if (masked) {
                        const uint at = page * kPage + 16u * simdgroup + 8u * uint(j) + column;
                        s.x = at <= position[i] ? s.x : -INFINITY;
                        s.y = at + 1u <= position[i] ? s.y : -INFINITY;
                    }
                    scores[2 * i + j] = s;
                }
                const float2 pair = max(scores[2 * i], scores[2 * i + 1]);
                const float peak = fragment_row_max(max(pair.x, pair.y));
                if ((lane & 9u) == 0u) tops[simdgroup * kRows + 8u * uint(i) + row] = peak;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float kept[kRowFragments];
#pragma clang loop unroll(full)
            for (int i = 0; i < kRowFragments; ++i) {
                const uint r = 8u * uint(i) + row;
                float peak = top[i];
#pragma clang loop unroll(full)
                for (uint s = 0u; s < 4u; ++s) peak = max(peak, tops[s * kRows + r]);
                const float finite =
                    peak == -INFINITY ? 0.0f : peak;  // a row may have no position in a split
                kept[i] = exp2(top[i] - finite);
                top[i] = peak;
                float sum = 0.0f;
#pragma clang loop unroll(full)
                for (int j = 0; j < 2; ++j) {
                    const float2 w =
                        float2(exp2(scores[2 * i + j].x - finite), exp2(scores[2 * i + j].y - finite));
                    *(threadgroup float2*)(weights + r * kWeightStride + 16u * simdgroup + 8u * uint(j) +
                                           column) = w;
                    sum += w.x + w.y;
                }
                total[i] = fma(total[i], kept[i], sum);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
            for (int i = 0; i < kRowFragments; ++i) {
#pragma clang loop unroll(full)
                for (int f = 0; f < kOwn; ++f) {
                    const float2 old = fragment_values(acc[i * kOwn + f]);
                    acc[i * kOwn + f] = fragment(old.x * kept[i], old.y * kept[i]);
                }
            }
            for (uint k = 0u; k < count; k += 8u) {
                // What lies beyond the length was never written and may be NaN.
                const bool inside = k + row < count;
                device const Cached* value =
                    values + min(k + row, count - 1u) * uint(D) + simdgroup * uint(D / 4) + column;
                Fragment v[kOwn];
#pragma clang loop unroll(full)
                for (int f = 0; f < kOwn; ++f) {
                    const vec<Cached, 2> two = *(device const vec<Cached, 2>*)(value + 8 * f);
                    v[f] = fragment(inside ? float(two.x) : 0.0f, inside ? float(two.y) : 0.0f);
                }
#pragma clang loop unroll(full)
                for (int i = 0; i < kRowFragments; ++i) {
                    threadgroup const float* at = weights + (8u * uint(i) + row) * kWeightStride + k + column;
                    const Fragment w = fragment(at[0], at[1]);
#pragma clang loop unroll(full)
                    for (int f = 0; f < kOwn; ++f) {
                        simdgroup_multiply_accumulate(acc[i * kOwn + f], w, v[f], acc[i * kOwn + f]);
                    }
                }
            }
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < kRowFragments; ++i) {
            const float sum = fragment_row_sum(total[i]);
            if ((lane & 9u) == 0u) totals[simdgroup * kRows + 8u * uint(i) + row] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool merges = walks && first_page != 0u;
        float2 all[kRowFragments];
        float2 factors[kRowFragments];
#pragma clang loop unroll(full)
        for (int i = 0; i < kRowFragments; ++i) {
            const uint r = 8u * uint(i) + row;
            const float2 own = float2(
                top[i], (totals[r] + totals[kRows + r]) + (totals[2u * kRows + r] + totals[3u * kRows + r]));
            all[i] = merges ? kept_statistics[r] : own;
            factors[i] = float2(0.0f);
            if (merges && position[i] >= first_page * kPage) factors[i] = merge(all[i], own);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (int i = 0; i < kRowFragments; ++i) {
            const uint r = 8u * uint(i) + row;
            if (simdgroup == 0u && column == 0u) kept_statistics[r] = all[i];
            const uint own_row = r / shape.pack;
            const uint own_head = first_head + r % shape.pack;
            if (own_row >= own_rows || own_head >= per_kv) continue;
            const uint head = kv_head * per_kv + own_head;
            const uint at = (first_row + own_row) * shape.heads + head;
            const uint cell = at * shape.splits + group.z;
            device const Activation* gates =
                projected + (first_row + own_row) * shape.stride + head * uint(2 * D) + uint(D);
#pragma clang loop unroll(full)
            for (int f = 0; f < kOwn; ++f) {
                float2 y = fragment_values(acc[i * kOwn + f]);
                const uint d = simdgroup * uint(D / 4) + 8u * uint(f) + column;
                device float2* kept_sums = (device float2*)(partial + cell * uint(D) + d);
                if (merges) {
                    const float2 before = *kept_sums;
                    const bool inside = position[i] >= first_page * kPage;
                    y.x = inside ? merged(before.x, y.x, factors[i]) : before.x;
                    y.y = inside ? merged(before.y, y.y, factors[i]) : before.y;
                }
                if (walks && !more) {
                    out[at * uint(D) + d] = Activation(y.x / all[i].y * sigmoid(float(gates[d])));
                    out[at * uint(D) + d + 1u] = Activation(y.y / all[i].y * sigmoid(float(gates[d + 1u])));
                } else {
                    *kept_sums = y;
                }
            }
            if (!walks && simdgroup == 0u && column == 0u) statistics[cell] = all[i];
        }
    }
}

[[kernel]] void join_splits(device const float* partial [[buffer(0)]],
                            device const float2* statistics [[buffer(1)]],
                            device const Activation* projected [[buffer(2)]],
                            device const uint* positions [[buffer(3)]], device Activation* out [[buffer(4)]],
                            constant AttentionRowsShape& shape [[buffer(5)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 size [[threads_per_threadgroup]], uint d [[thread_index_in_threadgroup]]) {
    const uint head = group.x;
    const uint row = group.y;
    const uint first = (row * shape.heads + head) * shape.splits;
    const uint split = shape.split_pages * kPage;
    const uint splits = (positions[0] + row + split) / split;  // those that this row's positions are in
    float2 all = statistics[first];
    float sum = partial[first * size.x + d];
    for (uint s = 1u; s < splits; ++s) {
        const float2 factors = merge(all, statistics[first + s]);
        sum = merged(sum, partial[(first + s) * size.x + d], factors);
    }
    const float gate = float(projected[row * shape.stride + head * 2u * size.x + size.x + d]);
    out[(row * shape.heads + head) * size.x + d] = Activation(sum / all.y * sigmoid(gate));
}

#define LILY_ATTEND_ROWS(cached, dim)                                   \
    template [[host_name("attend_rows_" #cached "_d" #dim)]] [[kernel]] \
    decltype(attend_rows<cached, dim>) attend_rows<cached, dim>;

LILY_ATTEND_ROWS(bfloat, 32)
LILY_ATTEND_ROWS(bfloat, 64)
LILY_ATTEND_ROWS(bfloat, 128)
LILY_ATTEND_ROWS(bfloat, 256)
LILY_ATTEND_ROWS(float, 64)
LILY_ATTEND_ROWS(float, 256)
