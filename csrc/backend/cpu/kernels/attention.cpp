// Attention over pages of keys and values, up to eight query heads of a KV head per read.
//
// Keys are walked in pages of 64 positions with a running maximum, pages in spans of 16; a span starts afresh
// and spans are joined in order. Pages and spans lie at fixed absolute positions, so a row's bits don't
// depend on the rows beside it. Bound by reading the cache for one row, by fp32 arithmetic for many.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/kernels/simd.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

constexpr int64_t kHeads = 8;       // query heads per pass over a page
constexpr int64_t kSpanPages = 16;  // pages per span

inline F32 load_cached(const uint16_t* p) { return F32::load_bf16(p); }
inline F32 load_cached(const float* p) { return F32::load(p); }

// scores[h][j] = q[h] . k[j] for the 64 keys of a page; keys lie transposed, [head_dim, 64].
template <int M, typename T>
void score_page(const float* queries, const T* keys, int64_t head_dim, float* scores) {
    for (int64_t block = 0; block < kPageTokens; block += 2 * kLanes) {
        F32 acc[M][2];
        for (int h = 0; h < M; ++h) acc[h][0] = acc[h][1] = F32::zero();
        for (int64_t d = 0; d < head_dim; ++d) {
            const F32 k0 = load_cached(keys + d * kPageTokens + block);
            const F32 k1 = load_cached(keys + d * kPageTokens + block + kLanes);
            for (int h = 0; h < M; ++h) {
                const F32 q = F32::set(queries[h * head_dim + d]);
                acc[h][0] = fma(q, k0, acc[h][0]);
                acc[h][1] = fma(q, k1, acc[h][1]);
            }
        }
        for (int h = 0; h < M; ++h) {
            acc[h][0].store(scores + h * kPageTokens + block);
            acc[h][1].store(scores + h * kPageTokens + block + kLanes);
        }
    }
}

// out[h] = alpha[h] out[h] + sum over j < count of weights[h][j] v[j]
template <int M, int V, typename T>
void add_values(const float* weights, const float* alpha, const T* values, int64_t count, int64_t head_dim,
                int64_t column, float* out) {
    F32 acc[M][V];
    for (int h = 0; h < M; ++h) {
        for (int i = 0; i < V; ++i)
            acc[h][i] = F32::load(out + h * head_dim + column + i * kLanes) * F32::set(alpha[h]);
    }
    for (int64_t j = 0; j < count; ++j) {
        F32 v[V];
        for (int i = 0; i < V; ++i) v[i] = load_cached(values + j * head_dim + column + i * kLanes);
        for (int h = 0; h < M; ++h) {
            const F32 w = F32::set(weights[h * kPageTokens + j]);
            for (int i = 0; i < V; ++i) acc[h][i] = fma(w, v[i], acc[h][i]);
        }
    }
    for (int h = 0; h < M; ++h) {
        for (int i = 0; i < V; ++i) acc[h][i].store(out + h * head_dim + column + i * kLanes);
    }
}

// The softmax of one query head so far: weights relative to `top`.
struct Running {
    float top = -std::numeric_limits<float>::infinity();
    float total = 0.0f;
};

// e^(a - b) for a <= b, where a may be minus infinity.
float shrink(float a, float b) { return a == b ? 1.0f : std::exp(a - b); }

template <int M, typename T>
void attend_heads(const AttentionTask& task, int64_t row, int64_t first_head) {
    const AttentionShape& shape = *task.shape;
    const KvLayout& layout = task.cache->layout();
    const int64_t dim = shape.head_dim;
    const float* projected = task.projected + row * task.stride;
    float* queries = task.scratch;
    float* scores = queries + M * dim;
    float* span_out = scores + M * kPageTokens;
    float* out = span_out + M * dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int h = 0; h < M; ++h) {
        const float* q = projected + (first_head + h) * 2 * dim;
        for (int64_t d = 0; d < dim; ++d) queries[h * dim + d] = q[d] * scale;
    }
    std::fill(out, out + M * dim, 0.0f);
    const int64_t visible = task.position + row + 1;
    const int64_t pages = (visible + kPageTokens - 1) / kPageTokens;
    Running joined[M];
    for (int64_t span = 0; span < pages; span += kSpanPages) {
        Running running[M];
        std::fill(span_out, span_out + M * dim, 0.0f);
        for (int64_t page = span; page < std::min(pages, span + kSpanPages); ++page) {
            const std::byte* base = task.cache->page(page);
            const auto* keys =
                reinterpret_cast<const T*>(base + layout.keys_offset(task.layer, task.kv_head));
            const auto* values =
                reinterpret_cast<const T*>(base + layout.values_offset(task.layer, task.kv_head));
            const int64_t count = std::min(kPageTokens, visible - page * kPageTokens);
            score_page<M>(queries, keys, dim, scores);
            float alpha[M];
            for (int h = 0; h < M; ++h) {
                float* s = scores + h * kPageTokens;
                std::fill(s + count, s + kPageTokens, -std::numeric_limits<float>::infinity());
                F32 peak = F32::load(s);
                for (int64_t j = kLanes; j < kPageTokens; j += kLanes) peak = max(peak, F32::load(s + j));
                const float top = std::max(running[h].top, largest(peak));
                alpha[h] = shrink(running[h].top, top);
                F32 total = F32::zero();
                for (int64_t j = 0; j < kPageTokens; j += kLanes)
                    exp(F32::load(s + j) - F32::set(top)).store(s + j);
                std::fill(s + count, s + kPageTokens, 0.0f);
                for (int64_t j = 0; j < kPageTokens; j += kLanes) total = total + F32::load(s + j);
                running[h] = {top, std::fma(running[h].total, alpha[h], sum(total))};
            }
            int64_t column = 0;
            for (; column + 2 * kLanes <= dim; column += 2 * kLanes) {
                add_values<M, 2>(scores, alpha, values, count, dim, column, span_out);
            }
            for (; column < dim; column += kLanes) {
                add_values<M, 1>(scores, alpha, values, count, dim, column, span_out);
            }
        }
        for (int h = 0; h < M; ++h) {
            const float top = std::max(joined[h].top, running[h].top);
            const float old = shrink(joined[h].top, top);
            const float fresh = shrink(running[h].top, top);
            joined[h] = {top, std::fma(joined[h].total, old, running[h].total * fresh)};
            for (int64_t d = 0; d < dim; d += kLanes) {
                const F32 kept = F32::load(out + h * dim + d) * F32::set(old);
                fma(F32::load(span_out + h * dim + d), F32::set(fresh), kept).store(out + h * dim + d);
            }
        }
    }
    for (int h = 0; h < M; ++h) {
        const float* gate = projected + (first_head + h) * 2 * dim + dim;
        float* target = task.out + row * task.out_stride + (first_head + h) * dim;
        const F32 inverse = F32::set(1.0f / joined[h].total);
        for (int64_t d = 0; d < dim; d += kLanes) {
            (F32::load(out + h * dim + d) * inverse * sigmoid(F32::load(gate + d))).store(target + d);
        }
    }
}

template <typename T, int M = static_cast<int>(kHeads)>
void attend_up_to(int64_t heads, const AttentionTask& task, int64_t row, int64_t first_head) {
    if constexpr (M > 1) {
        if (heads < M) return attend_up_to<T, M - 1>(heads, task, row, first_head);
    }
    attend_heads<M, T>(task, row, first_head);
}

template <typename T>
void append_row(const float* keys, const float* values, int64_t dim, int64_t slot, T* cached_keys,
                T* cached_values) {
    const auto encode = [](float x) {
        if constexpr (sizeof(T) == 2) {
            return float_to_bf16(x);
        } else {
            return x;
        }
    };
    for (int64_t d = 0; d < dim; ++d) {
        cached_keys[d * kPageTokens + slot] = encode(keys[d]);
        cached_values[slot * dim + d] = encode(values[d]);
    }
}

}  // namespace

int64_t attention_scratch_floats(const AttentionShape& shape) {
    return kHeads * (3 * shape.head_dim + kPageTokens);
}

void attend(const AttentionTask& task) {
    const int64_t group = task.shape->heads / task.shape->kv_heads;
    const bool half = task.cache->layout().dtype == KvDtype::bf16;
    for (int64_t row = 0; row < task.rows; ++row) {
        for (int64_t head = 0; head < group; head += kHeads) {
            const int64_t first = task.kv_head * group + head;
            const int64_t heads = std::min(kHeads, group - head);
            half ? attend_up_to<uint16_t>(heads, task, row, first)
                 : attend_up_to<float>(heads, task, row, first);
        }
    }
}

void rotary_append(const RotaryAppend& op, float* projected_row, int64_t position, KvCache& cache) {
    const AttentionShape& shape = op.shape;
    const int64_t dim = shape.head_dim;
    const int64_t pairs = shape.rotary_dim / 2;
    constexpr int64_t kMaxPairs = 256;
    float cosine[kMaxPairs];
    float sine[kMaxPairs];
    for (int64_t i = 0; i < pairs; ++i) {
        const double frequency =
            std::pow(shape.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rotary_dim));
        const double angle = static_cast<double>(position) * frequency;
        cosine[i] = static_cast<float>(std::cos(angle));
        sine[i] = static_cast<float>(std::sin(angle));
    }
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
        std::byte* k = page + layout.keys_offset(op.cache, head);
        std::byte* v = page + layout.values_offset(op.cache, head);
        if (layout.dtype == KvDtype::bf16) {
            append_row(keys + head * dim, values + head * dim, dim, slot, reinterpret_cast<uint16_t*>(k),
                       reinterpret_cast<uint16_t*>(v));
        } else {
            append_row(keys + head * dim, values + head * dim, dim, slot, reinterpret_cast<float*>(k),
                       reinterpret_cast<float*>(v));
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
