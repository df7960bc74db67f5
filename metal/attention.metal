// Gated attention of a decode step over paged keys and values, for one to eight rows.
//
// rotary_append  per head  x / sqrt(mean(x^2) + eps) * norm, then the rotation of the first 2 P dimensions
//                (x_i, x_{i+P}) -> (x_i cos - x_{i+P} sin, x_{i+P} cos + x_i sin). Queries are rewritten in
//                place, keys and values go to the cache. cos and sin come from two tables made in fp64,
//                [positions / 512, P] and [512, P]: the angle of position p is that of p / 512 * 512 and
//                that of p % 512, joined by one complex product; error 2e-7 at any position.
//                Launch: (ceil((heads + kv_heads) / 4), rows) threadgroups of 128 threads, a simdgroup per
//                head.
// attend         split s of a row: top = max score, total = sum of w, out = sum of w v, w = exp(score - top),
//                score = q k / sqrt(D). HEADS query heads of a KV head share a threadgroup and its reads.
//                Launch: (kv_heads * ceil(group / HEADS), splits, rows) threadgroups of 128 threads;
//                threadgroups beyond a row's length leave at once.
// attend_combine out = (sum_s e^(top_s - top) out_s) / (sum_s e^(top_s - top) total_s) * sigmoid(gate).
//                Launch: (heads, D / 32, rows) threadgroups of 256 threads: a lane has a dimension,
//                simdgroup i takes splits i, i + 8, ..., the eight are joined in order.
//
// projected [rows, stride]: per head q (D) | gate (D), then keys and values [kv_heads, D].
// Pages of 64 positions: per layer and KV head keys transposed [D, 64], values [64, D]; a page is found by
// the row's table, pages[sequences[row] * table_stride + position / 64], at page * page_stride elements.
// A lane takes two positions for the scores (neighbouring bytes of transposed keys, no reduction over lanes)
// and D / 32 dimensions for the values (neighbouring bytes of a row).
// Splits lie at fixed absolute positions. Their size follows from the row's own length alone: 1 page below
// medium_from, 4 below long_from, 16 from there; so a row's bits don't depend on its company.
// Bound: reading the cache once per HEADS query heads.
#include "common/attention_shape.h"

// The less clever path, for comparison (metal/ablation/strided_attention.metal): neighbouring lanes read far
// bytes of the cache.
#ifdef LILY_STRIDED_READS
constant constexpr const bool kStrided = true;
#else
constant constexpr const bool kStrided = false;
#endif

constant constexpr const uint kSimdgroups = 4u;     // of attend
constant constexpr const uint kCombineGroups = 8u;  // simdgroups of attend_combine

inline uint split_pages(uint length, uint medium_from, uint long_from) {
    return length < medium_from ? 1u : length < long_from ? 4u : 16u;
}

inline uint split_count(uint length, uint medium_from, uint long_from) {
    const uint positions = split_pages(length, medium_from, long_from) * kPage;
    return (length + positions - 1u) / positions;
}

// e^(a - b) for a <= b
inline float shrink(float a, float b) { return a == b ? 1.0f : exp(a - b); }

template <typename Cached, int D>
[[kernel]] void rotary_append(
    device Activation* projected [[buffer(0)]], device const float* q_norm [[buffer(1)]],
    device const float* k_norm [[buffer(2)]], device const float2* coarse [[buffer(3)]],
    device const float2* fine [[buffer(4)]], device const uint* positions [[buffer(5)]],
    device const uint* sequences [[buffer(6)]], device const uint* pages [[buffer(7)]],
    device Cached* cache [[buffer(8)]], constant AttentionShape& shape [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    constexpr int kPerLane = D / 32;
    constexpr int kNormed = 4 * D;
    threadgroup float normed[kNormed];
    const uint head = group.x * 4u + simdgroup;
    const uint row = group.y;
    if (head >= shape.heads + shape.kv_heads) return;  // a whole simdgroup; no threadgroup barrier follows
    const bool is_query = head < shape.heads;
    const uint kv_head = head - shape.heads;
    device Activation* x = projected + row * shape.stride +
                           (is_query ? head * uint(2 * D) : shape.heads * uint(2 * D) + kv_head * uint(D));
    float values[kPerLane];
    float squares = 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < kPerLane; ++i) {
        values[i] = float(x[lane + 32u * uint(i)]);
        squares = fma(values[i], values[i], squares);
    }
    const float inverse = 1.0f / sqrt(simd_sum(squares) / float(D) + shape.eps);
    threadgroup float* mine = normed + simdgroup * uint(D);
#pragma clang loop unroll(full)
    for (int i = 0; i < kPerLane; ++i) {
        const uint d = lane + 32u * uint(i);
        values[i] = values[i] * inverse * (is_query ? q_norm[d] : k_norm[d]);
        mine[d] = values[i];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint position = positions[row];
    const uint pairs = shape.pairs;
#pragma clang loop unroll(full)
    for (int i = 0; i < kPerLane; ++i) {
        const uint d = lane + 32u * uint(i);
        if (d < 2u * pairs) {
            const uint pair = d < pairs ? d : d - pairs;
            const float2 a = coarse[position / kFinePositions * pairs + pair];
            const float2 b = fine[position % kFinePositions * pairs + pair];
            const float cosine = fma(a.x, b.x, -(a.y * b.y));
            const float sine = fma(a.x, b.y, a.y * b.x);
            const float other = mine[d < pairs ? d + pairs : d - pairs];
            values[i] =
                d < pairs ? fma(values[i], cosine, -(other * sine)) : fma(values[i], cosine, other * sine);
        }
    }
    if (is_query) {
#pragma clang loop unroll(full)
        for (int i = 0; i < kPerLane; ++i) x[lane + 32u * uint(i)] = Activation(values[i]);
        return;
    }
    const uint page = pages[sequences[row] * shape.table_stride + position / kPage];
    device Cached* keys = cache + ulong(page) * ulong(shape.page_stride) + shape.layer_offset +
                          kv_head * (2u * kPage * uint(D));
    device Cached* stored = keys + kPage * uint(D) + position % kPage * uint(D);
    device const Activation* v = x + shape.kv_heads * uint(D);
#pragma clang loop unroll(full)
    for (int i = 0; i < kPerLane; ++i) {
        const uint d = lane + 32u * uint(i);
        keys[d * kPage + position % kPage] = Cached(values[i]);
        stored[d] = Cached(float(v[d]));
    }
}

template <typename Cached, int D, int HEADS>
[[kernel]] void attend(device const Activation* projected [[buffer(0)]],
                       device const uint* positions [[buffer(1)]], device const uint* sequences [[buffer(2)]],
                       device const uint* pages [[buffer(3)]], device const Cached* cache [[buffer(4)]],
                       device float* partial [[buffer(5)]], device float2* statistics [[buffer(6)]],
                       constant AttentionShape& shape [[buffer(7)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    constexpr int kPerLane = D / 32;              // dimensions of a lane
    constexpr int kSlice = D / int(kSimdgroups);  // dimensions of a simdgroup for the scores
    constexpr int kQueries = D * HEADS;
    constexpr int kScores = int(kSimdgroups) * HEADS * 64;
    constexpr int kJoined = int(kSimdgroups) * D;
    threadgroup float queries[kQueries];  // [D, HEADS]
    threadgroup float2 scores[kScores];   // two buffers of [simdgroups, HEADS, 32] pairs
    threadgroup float joined[kJoined];
    const uint row = group.z;
    const uint length = positions[row] + 1u;
    const uint span = split_pages(length, shape.medium_from, shape.long_from);
    const uint first_page = group.y * span;
    if (first_page * kPage >= length) return;
    const uint per_kv = shape.heads / shape.kv_heads;
    const uint packs = (per_kv + uint(HEADS) - 1u) / uint(HEADS);
    const uint kv_head = group.x / packs;
    const uint first_head = group.x % packs * uint(HEADS);  // within the KV head
    const float scale = 1.0f / sqrt(float(D));
    for (uint i = index; i < uint(D * HEADS); i += kSimdgroups * 32u) {
        const uint head = min(first_head + i % uint(HEADS), per_kv - 1u);
        const uint at = (kv_head * per_kv + head) * uint(2 * D) + i / uint(HEADS);
        queries[i] = float(projected[row * shape.stride + at]) * scale;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint last_page = min(first_page + span, (length + kPage - 1u) / kPage);
    float top[HEADS];
    float total[HEADS];
    float acc[HEADS * kPerLane];
#pragma clang loop unroll(full)
    for (int h = 0; h < HEADS; ++h) {
        top[h] = -INFINITY;
        total[h] = 0.0f;
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < HEADS * kPerLane; ++i) acc[i] = 0.0f;
    for (uint page = first_page; page < last_page; ++page) {
        const uint number = pages[sequences[row] * shape.table_stride + page];
        device const Cached* keys = cache + ulong(number) * ulong(shape.page_stride) + shape.layer_offset +
                                    kv_head * (2u * kPage * uint(D));
        device const Cached* values = keys + kPage * uint(D);
        const uint count = min(kPage, length - page * kPage);
        // Scores of positions 2 lane, 2 lane + 1 over the dimensions of this simdgroup.
        float2 part[HEADS];
#pragma clang loop unroll(full)
        for (int h = 0; h < HEADS; ++h) part[h] = float2(0.0f);
        if (2u * lane < count) {
            const uint begin = simdgroup * uint(kSlice);
            device const vec<Cached, 2>* pair = (device const vec<Cached, 2>*)(keys + begin * kPage) + lane;
#pragma clang loop unroll_count(4)
            for (uint i = 0u; i < uint(kSlice); ++i) {
                const uint d = kStrided ? (i + lane) % uint(kSlice) : i;
                const vec<Cached, 2> two = pair[d * (kPage / 2u)];
                const float2 k = float2(float(two.x), float(two.y));
#pragma clang loop unroll(full)
                for (int h = 0; h < HEADS; ++h) {
                    const float q = queries[(begin + d) * uint(HEADS) + uint(h)];
                    part[h] = float2(fma(q, k.x, part[h].x), fma(q, k.y, part[h].y));
                }
            }
        }
        threadgroup float2* buffer = scores + page % 2u * (kSimdgroups * uint(HEADS) * 32u);
#pragma clang loop unroll(full)
        for (int h = 0; h < HEADS; ++h) buffer[(simdgroup * uint(HEADS) + uint(h)) * 32u + lane] = part[h];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // Every simdgroup joins the four slices and takes the softmax of the page.
        float2 weight[HEADS];
#pragma clang loop unroll(full)
        for (int h = 0; h < HEADS; ++h) {
            float2 score = buffer[uint(h) * 32u + lane];
            for (uint s = 1u; s < kSimdgroups; ++s) score += buffer[(s * uint(HEADS) + uint(h)) * 32u + lane];
            score.x = 2u * lane < count ? score.x : -INFINITY;
            score.y = 2u * lane + 1u < count ? score.y : -INFINITY;
            const float peak = max(top[h], simd_max(max(score.x, score.y)));
            const float kept = shrink(top[h], peak);
            weight[h].x = 2u * lane < count ? exp(score.x - peak) : 0.0f;
            weight[h].y = 2u * lane + 1u < count ? exp(score.y - peak) : 0.0f;
            total[h] = fma(total[h], kept, simd_sum(weight[h].x + weight[h].y));
            top[h] = peak;
#pragma clang loop unroll(full)
            for (int i = 0; i < kPerLane; ++i) acc[h * kPerLane + i] *= kept;
        }
        // Positions simdgroup, simdgroup + 4, ...; a lane has neighbouring dimensions.
        const uint own = count > simdgroup ? (count - simdgroup + kSimdgroups - 1u) / kSimdgroups : 0u;
        for (uint n = 0u; n < own; ++n) {
            const uint j = simdgroup + kSimdgroups * (kStrided ? (n + lane) % own : n);
            device const Cached* value = values + j * uint(D) + lane * uint(kPerLane);
            float v[kPerLane];
            if (kPerLane % 4 == 0) {
#pragma clang loop unroll(full)
                for (int i = 0; i < kPerLane / 4; ++i) {
                    const vec<Cached, 4> four = ((device const vec<Cached, 4>*)value)[i];
                    v[4 * i] = float(four.x);
                    v[4 * i + 1] = float(four.y);
                    v[4 * i + 2] = float(four.z);
                    v[4 * i + 3] = float(four.w);
                }
            } else {
#pragma clang loop unroll(full)
                for (int i = 0; i < kPerLane; ++i) v[i] = float(value[i]);
            }
#pragma clang loop unroll(full)
            for (int h = 0; h < HEADS; ++h) {
                const float w = simd_shuffle(j % 2u == 0u ? weight[h].x : weight[h].y, ushort(j / 2u));
#pragma clang loop unroll(full)
                for (int i = 0; i < kPerLane; ++i)
                    acc[h * kPerLane + i] = fma(w, v[i], acc[h * kPerLane + i]);
            }
        }
    }
    // The four simdgroups in order.
#pragma clang loop unroll(full)
    for (int h = 0; h < HEADS; ++h) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (int i = 0; i < kPerLane; ++i) {
            joined[simdgroup * uint(D) + lane * uint(kPerLane) + uint(i)] = acc[h * kPerLane + i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (first_head + uint(h) < per_kv) {
            const uint head = kv_head * per_kv + first_head + uint(h);
            const uint at = (row * shape.heads + head) * shape.splits + group.y;
            for (uint d = index; d < uint(D); d += kSimdgroups * 32u) {
                float sum = joined[d];
                for (uint s = 1u; s < kSimdgroups; ++s) sum += joined[s * uint(D) + d];
                partial[at * uint(D) + d] = sum;
            }
            if (index == 0u) statistics[at] = float2(top[h], total[h]);
        }
    }
}

[[kernel]] void attend_combine(
    device const float* partial [[buffer(0)]], device const float2* statistics [[buffer(1)]],
    device const Activation* projected [[buffer(2)]], device const uint* positions [[buffer(3)]],
    device Activation* out [[buffer(4)]], constant AttentionShape& shape [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float sums[256];
    threadgroup float totals[8];
    const uint head = group.x;
    const uint row = group.z;
    const uint dim = groups.y * 32u;
    const uint d = group.y * 32u + lane;
    const uint splits = split_count(positions[row] + 1u, shape.medium_from, shape.long_from);
    const uint first = (row * shape.heads + head) * shape.splits;
    float top = -INFINITY;
    for (uint s = lane; s < splits; s += 32u) top = max(top, statistics[first + s].x);
    top = simd_max(top);
    float sum = 0.0f;
    float total = 0.0f;
    for (uint s = simdgroup; s < splits; s += kCombineGroups) {
        const float2 split = statistics[first + s];
        const float weight = shrink(split.x, top);
        sum = fma(weight, partial[(first + s) * dim + d], sum);
        total = fma(weight, split.y, total);
    }
    sums[simdgroup * 32u + lane] = sum;
    if (lane == 0u) totals[simdgroup] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0u) {
        for (uint s = 1u; s < kCombineGroups; ++s) {
            sum += sums[s * 32u + lane];
            total += totals[s];
        }
        const float gate = float(projected[row * shape.stride + head * 2u * dim + dim + d]);
        out[(row * shape.heads + head) * dim + d] = Activation(sum / total * sigmoid(gate));
    }
}

#define LILY_ATTEND(cached, dim, heads)                                        \
    template [[host_name("attend_" #cached "_d" #dim "_h" #heads)]] [[kernel]] \
    decltype(attend<cached, dim, heads>) attend<cached, dim, heads>;
#define LILY_ATTENTION(cached, dim)                                       \
    template [[host_name("rotary_append_" #cached "_d" #dim)]] [[kernel]] \
    decltype(rotary_append<cached, dim>) rotary_append<cached, dim>;      \
    LILY_ATTEND(cached, dim, 1)                                           \
    LILY_ATTEND(cached, dim, 4)                                           \
    LILY_ATTEND(cached, dim, 8)

// The kernels for one cache and one head size, by -D LILY_CACHED=float -D LILY_HEAD_DIM=128, or for those
// that are usual.
#ifdef LILY_HEAD_DIM
#define LILY_ATTENTION_OF(cached, dim) LILY_ATTENTION(cached, dim)
LILY_ATTENTION_OF(LILY_CACHED, LILY_HEAD_DIM)
#else
LILY_ATTENTION(bfloat, 32)
LILY_ATTENTION(bfloat, 64)
LILY_ATTENTION(bfloat, 128)
LILY_ATTENTION(bfloat, 256)
LILY_ATTENTION(float, 64)
LILY_ATTENTION(float, 256)
#endif
