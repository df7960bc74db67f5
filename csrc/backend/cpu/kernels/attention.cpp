// Attention over pages of keys and values, up to eight query heads of a KV head per read.
//
// Keys are walked in pages of 64 positions with a running maximum, pages in spans of 16; a span starts afresh
// and spans are joined in order. Pages and spans lie at fixed absolute positions, so a row's bits depend
// neither on the rows beside it nor on who computes which span. All rows of a task meet a page before the
// next one is read. Bound by reading the cache for one row, by fp32 arithmetic for many.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/kernels/prefetch.h"
#include "backend/cpu/kernels/simd.h"
#include "backend/cpu/kernels/tables.h"
#include "base/numeric.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

constexpr int64_t kHeads = 8;  // query heads per pass over a page
constexpr int64_t kSpanPages = kSpanTokens / kPageTokens;

inline F32 load_cached(const uint16_t* p) { return F32::load_bf16(p); }
inline F32 load_cached(const float* p) { return F32::load(p); }
inline F32 load_cached(const int8_t* p) { return F32::load_int8(p); }

// The keys or the values of one page and KV head, and the same of the page that is read next; while 32
// numbers of one are used, as many of the other are asked for. Bytes have scales, [head_dim / kScaleDims,
// 64].
template <typename T>
struct Plane {
    static constexpr bool kScaled = sizeof(T) == 1;
    const T* numbers;
    const float* scales;
    const T* next;
    void ahead(int64_t step) const { prefetch(reinterpret_cast<const std::byte*>(next + step * 2 * kLanes)); }
};

// acc[h] += q[h][d] k[d][block .. block + 32) for dimensions [begin, end)
template <int M, typename T>
inline void add_scores(const float* queries, const Plane<T>& keys, int64_t head_dim, int64_t block,
                       int64_t begin, int64_t end, F32 (&acc)[M][2]) {
    for (int64_t d = begin; d < end; ++d) {
        keys.ahead(block / (2 * kLanes) * head_dim + d);
        const F32 k0 = load_cached(keys.numbers + d * kPageTokens + block);
        const F32 k1 = load_cached(keys.numbers + d * kPageTokens + block + kLanes);
#pragma GCC unroll 8
        for (int h = 0; h < M; ++h) {
            const F32 q = F32::set(queries[h * head_dim + d]);
            acc[h][0] = fma(q, k0, acc[h][0]);
            acc[h][1] = fma(q, k1, acc[h][1]);
        }
    }
}

// scores[h][j] = q[h] . k[j] for the 64 keys of a page; keys lie transposed, [head_dim, 64].
template <int M, typename T>
void score_page(const float* queries, Plane<T> keys, int64_t head_dim, float* scores) {
    for (int64_t block = 0; block < kPageTokens; block += 2 * kLanes) {
        F32 acc[M][2];
#pragma GCC unroll 8
        for (int h = 0; h < M; ++h) acc[h][0] = acc[h][1] = F32::zero();
        if constexpr (Plane<T>::kScaled) {
            for (int64_t d = 0; d < head_dim; d += kScaleDims) {
                F32 part[M][2];
#pragma GCC unroll 8
                for (int h = 0; h < M; ++h) part[h][0] = part[h][1] = F32::zero();
                add_scores<M>(queries, keys, head_dim, block, d, std::min(d + kScaleDims, head_dim), part);
                const float* scales = keys.scales + d / kScaleDims * kPageTokens + block;
#pragma GCC unroll 8
                for (int h = 0; h < M; ++h) {
                    acc[h][0] = fma(part[h][0], F32::load(scales), acc[h][0]);
                    acc[h][1] = fma(part[h][1], F32::load(scales + kLanes), acc[h][1]);
                }
            }
        } else {
            add_scores<M>(queries, keys, head_dim, block, 0, head_dim, acc);
        }
#pragma GCC unroll 8
        for (int h = 0; h < M; ++h) {
            acc[h][0].store(scores + h * kPageTokens + block);
            acc[h][1].store(scores + h * kPageTokens + block + kLanes);
        }
    }
}

// out[h] = alpha[h] out[h] + sum over j < count of weights[h][j] v[j], for V vectors of columns
template <int M, int V, typename T>
void add_values(const float* weights, const float* alpha, const Plane<T>& values, int64_t count,
                int64_t head_dim, int64_t column, float* out, int64_t stride) {
    F32 acc[M][V];
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i)
            acc[h][i] = F32::load(out + h * stride + column + i * kLanes) * F32::set(alpha[h]);
    }
    for (int64_t j = 0; j < count; ++j) {
        values.ahead(column / (2 * kLanes) * kPageTokens + j);
        F32 v[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) v[i] = load_cached(values.numbers + j * head_dim + column + i * kLanes);
#pragma GCC unroll 8
        for (int h = 0; h < M; ++h) {
            const F32 w = F32::set(weights[h * kPageTokens + j]);
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) acc[h][i] = fma(w, v[i], acc[h][i]);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) acc[h][i].store(out + h * stride + column + i * kLanes);
    }
}

// The same for all columns.
template <int M, typename T>
void add_page(const float* weights, const float* alpha, const Plane<T>& values, int64_t count,
              int64_t head_dim, float* out, int64_t stride) {
    float scaled[Plane<T>::kScaled ? M * kPageTokens : 1];
    for (int64_t column = 0; column < head_dim;) {
        const float* factors = weights;
        if constexpr (Plane<T>::kScaled) {
            factors = scaled;
            const float* scales = values.scales + column / kScaleDims * kPageTokens;
            for (int64_t i = 0; column % kScaleDims == 0 && i < M * kPageTokens; i += kLanes) {
                (F32::load(weights + i) * F32::load(scales + i % kPageTokens)).store(scaled + i);
            }
        }
        if (column + 2 * kLanes <= head_dim) {
            add_values<M, 2>(factors, alpha, values, count, head_dim, column, out, stride);
            column += 2 * kLanes;
        } else {
            add_values<M, 1>(factors, alpha, values, count, head_dim, column, out, stride);
            column += kLanes;
        }
    }
}

// e^(a - b) for a <= b, where a may be minus infinity.
float shrink(float a, float b) { return a == b ? 1.0f : std::exp(a - b); }

// One page against M heads of one row: `partials` so far, `stride` floats from head to head.
template <int M, typename T>
void attend_page(const float* queries, Plane<T> keys, Plane<T> values, int64_t count, int64_t dim,
                 float* scores, float* partials, int64_t stride) {
    score_page<M>(queries, keys, dim, scores);
    float alpha[M];
    for (int h = 0; h < M; ++h) {
        float* s = scores + h * kPageTokens;
        std::fill(s + count, s + kPageTokens, -std::numeric_limits<float>::infinity());
        F32 peak = F32::load(s);
        for (int64_t j = kLanes; j < kPageTokens; j += kLanes) peak = max(peak, F32::load(s + j));
        float& top = partials[h * stride + dim];
        float& total = partials[h * stride + dim + 1];
        const float higher = std::max(top, largest(peak));
        alpha[h] = shrink(top, higher);
        for (int64_t j = 0; j < kPageTokens; j += kLanes)
            exp(F32::load(s + j) - F32::set(higher)).store(s + j);
        std::fill(s + count, s + kPageTokens, 0.0f);
        F32 sums = F32::zero();
        for (int64_t j = 0; j < kPageTokens; j += kLanes) sums = sums + F32::load(s + j);
        total = std::fma(total, alpha[h], sum(sums));
        top = higher;
    }
    add_page<M>(scores, alpha, values, count, dim, partials, stride);
}

// The form for as many heads as there are, at most kHeads.
template <typename T, int M = static_cast<int>(kHeads)>
auto page_kernel(int64_t heads) {
    if constexpr (M > 1) {
        if (heads < M) return page_kernel<T, M - 1>(heads);
    }
    return &attend_page<M, T>;
}

template <typename T>
void attend_pages(const AttentionTask& task, int64_t span, float* partials, float* scratch) {
    const KvLayout& layout = task.cache->layout();
    const int64_t dim = task.shape->head_dim;
    const int64_t group = task.group();
    const int64_t stride = attention_floats(*task.shape);
    float* queries = scratch;
    float* scores = scratch + task.rows * group * dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t row = 0; row < task.rows; ++row) {
        for (int64_t head = 0; head < group; ++head) {
            const float* q = task.projected + (task.first_row + row) * task.shape->projected() +
                             (task.kv_head * group + head) * 2 * dim;
            float* query = queries + (row * group + head) * dim;
            for (int64_t d = 0; d < dim; ++d) query[d] = q[d] * scale;
            float* partial = partials + (row * group + head) * stride;
            std::fill(partial, partial + dim, 0.0f);
            partial[dim] = -std::numeric_limits<float>::infinity();
            partial[dim + 1] = 0.0f;
        }
    }
    const auto plane = [&](int64_t page, int64_t offset) {
        const bool more = task.prefetch && (page + 1) * kPageTokens < task.visible(task.rows - 1);
        const std::byte* base = task.cache->page(page) + offset;
        return Plane<T>{reinterpret_cast<const T*>(base),
                        reinterpret_cast<const float*>(base + layout.numbers_bytes()),
                        reinterpret_cast<const T*>(task.cache->page(more ? page + 1 : page) + offset)};
    };
    const int64_t end =
        std::min((span + 1) * kSpanPages, (task.visible(task.rows - 1) + kPageTokens - 1) / kPageTokens);
    for (int64_t page = span * kSpanPages; page < end; ++page) {
        const Plane<T> keys = plane(page, layout.keys_offset(task.layer, task.kv_head));
        const Plane<T> values = plane(page, layout.values_offset(task.layer, task.kv_head));
        for (int64_t row = 0; row < task.rows; ++row) {
            const int64_t count = std::min(kPageTokens, task.visible(row) - page * kPageTokens);
            if (count <= 0) continue;
            for (int64_t head = 0; head < group; head += kHeads) {
                page_kernel<T>(std::min(kHeads, group - head))(
                    queries + (row * group + head) * dim, keys, values, count, dim, scores,
                    partials + (row * group + head) * stride, stride);
            }
        }
    }
}

// A key or a value on its way into a page: number i of it goes to cached[i * step].
void store_numbers(const float* x, int64_t count, int64_t step, float* cached) {
    for (int64_t i = 0; i < count; ++i) cached[i * step] = x[i];
}

void store_numbers(const float* x, int64_t count, int64_t step, uint16_t* cached) {
    for (int64_t i = 0; i < count; ++i) cached[i * step] = float_to_bf16(x[i]);
}

// Bytes with a scale for each kScaleDims of them: scale = max|x| / 127, byte = round(x * (127 / max|x|)). A
// block with a number that is not finite gets a NaN scale.
void store_scaled(const float* x, int64_t count, int64_t step, int8_t* cached, float* scales) {
    for (int64_t begin = 0; begin < count; begin += kScaleDims) {
        const int64_t end = std::min(begin + kScaleDims, count);
        F32 peak = F32::zero();
        F32 faults = F32::zero();
        for (int64_t i = begin; i < end; i += kLanes) {
            peak = max(abs(F32::load(x + i)), peak);
            faults = fma(F32::load(x + i), F32::zero(), faults);
        }
        const float top = largest(peak);
        const bool sound = sum(faults) == 0.0f;
        const bool usable = sound && top > 1e-30f;
        const F32 inverse = F32::set(usable ? 127.0f / top : 0.0f);
        scales[begin / kScaleDims * kPageTokens] = usable  ? top / 127.0f
                                                   : sound ? 0.0f
                                                           : std::numeric_limits<float>::quiet_NaN();
        for (int64_t i = begin; i < end; i += kLanes) {
            int8_t bytes[kLanes] = {};
            if (usable) store_bytes(round_to_int(F32::load(x + i) * inverse), bytes);
            for (int64_t j = 0; j < kLanes; ++j) cached[(i + j) * step] = bytes[j];
        }
    }
}

// The key or value of `slot` into its plane of a page, from number `first` on.
void store_cached(const KvLayout& layout, const float* x, int64_t first, int64_t step, int64_t slot,
                  std::byte* plane) {
    const int64_t dim = layout.head_dim;
    switch (layout.dtype) {
        case KvDtype::bf16:
            return store_numbers(x, dim, step, reinterpret_cast<uint16_t*>(plane) + first);
        case KvDtype::f32:
            return store_numbers(x, dim, step, reinterpret_cast<float*>(plane) + first);
        case KvDtype::int8:
            return store_scaled(x, dim, step, reinterpret_cast<int8_t*>(plane) + first,
                                reinterpret_cast<float*>(plane + layout.numbers_bytes()) + slot);
    }
}

}  // namespace

int64_t attention_scratch_floats(const AttentionShape& shape, int64_t rows) {
    return rows * shape.heads / shape.kv_heads * shape.head_dim + kHeads * kPageTokens;
}

void attend_span(const AttentionTask& task, int64_t span, float* partials, float* scratch) {
    switch (task.cache->layout().dtype) {
        case KvDtype::bf16:
            return attend_pages<uint16_t>(task, span, partials, scratch);
        case KvDtype::f32:
            return attend_pages<float>(task, span, partials, scratch);
        case KvDtype::int8:
            return attend_pages<int8_t>(task, span, partials, scratch);
    }
}

void join_span(const AttentionTask& task, int64_t span, const float* partials, float* joined) {
    const int64_t dim = task.shape->head_dim;
    const int64_t stride = attention_floats(*task.shape);
    for (int64_t row = 0; row < task.rows; ++row) {
        if (task.visible(row) <= span * kSpanTokens) continue;
        for (int64_t head = 0; head < task.group(); ++head) {
            const float* part = partials + (row * task.group() + head) * stride;
            float* all = joined + (row * task.group() + head) * stride;
            const float top = std::max(all[dim], part[dim]);
            const float old = shrink(all[dim], top);
            const float fresh = shrink(part[dim], top);
            for (int64_t d = 0; d < dim; d += kLanes) {
                const F32 kept = F32::load(all + d) * F32::set(old);
                fma(F32::load(part + d), F32::set(fresh), kept).store(all + d);
            }
            all[dim] = top;
            all[dim + 1] = std::fma(all[dim + 1], old, part[dim + 1] * fresh);
        }
    }
}

void finish_attention(const AttentionTask& task, const float* joined, float* out) {
    const int64_t dim = task.shape->head_dim;
    const int64_t stride = attention_floats(*task.shape);
    for (int64_t row = 0; row < task.rows; ++row) {
        for (int64_t head = 0; head < task.group(); ++head) {
            const int64_t query = task.kv_head * task.group() + head;
            const float* all = joined + (row * task.group() + head) * stride;
            const int64_t at = task.first_row + row;
            const float* gate = task.projected + at * task.shape->projected() + query * 2 * dim + dim;
            float* target = out + at * task.shape->queries() + query * dim;
            const F32 inverse = F32::set(1.0f / all[dim + 1]);
            for (int64_t d = 0; d < dim; d += kLanes) {
                (F32::load(all + d) * inverse * sigmoid(F32::load(gate + d))).store(target + d);
            }
        }
    }
}

void rotary_append(const RotaryAppend& op, float* projected_row, const float* angles, int64_t position,
                   KvCache& cache) {
    const AttentionShape& shape = op.shape;
    const int64_t dim = shape.head_dim;
    const int64_t pairs = shape.rotary_dim / 2;
    const float* cosine = angles;
    const float* sine = angles + pairs;
    const auto rotate = [&](float* x, const Vector& norm) {
        rms_norm(x, norm->data(), op.eps, dim, x);
        for (int64_t i = 0; i < pairs; ++i) {
            const float a = x[i];
            const float b = x[i + pairs];
            x[i] = std::fma(a, cosine[i], -(b * sine[i]));
            x[i + pairs] = std::fma(b, cosine[i], a * sine[i]);
        }
    };
    for (int64_t head = 0; head < shape.heads; ++head) rotate(projected_row + head * 2 * dim, op.q_norm);
    float* keys = projected_row + 2 * shape.queries();
    const float* values = keys + shape.keys();
    const KvLayout& layout = cache.layout();
    std::byte* page = cache.page(position / kPageTokens);
    const int64_t slot = position % kPageTokens;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
        rotate(keys + head * dim, op.k_norm);
        store_cached(layout, keys + head * dim, slot, kPageTokens, slot,
                     page + layout.keys_offset(op.cache, head));
        store_cached(layout, values + head * dim, slot * dim, 1, slot,
                     page + layout.values_offset(op.cache, head));
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
