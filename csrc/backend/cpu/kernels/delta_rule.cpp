// Gated DeltaNet: causal convolution, unit q and k, and the delta rule as a scan over the tokens.
//
// Per value head, state S [key_dim, value_dim]:
//   u = S^T k;  d = beta (v - decay u);  S <- decay S + k d^T;  o = S^T q
// A strip of columns of S stays in the first-level cache through the whole scan; one pass over it updates S
// and takes the sums of this token's o and of the next one's u. Sums over key_dim run in two interleaved
// halves, whatever the strip. Bound by reading and writing S for one token, by arithmetic for many.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels/simd.h"
#include "backend/cpu/kernels/tables.h"

namespace lily::cpu {
namespace LILY_ISA {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the length of q and k, as in the reference implementations

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// 16 V columns of a state [key_dim, stride]; sums over keys in two halves.
template <int V>
struct Strip {
    float* state;
    int64_t stride;
    int64_t key_dim;

    // recalled = S^T k
    void recall(const float* k, F32 recalled[V]) const {
        F32 part[2][V];
        clear(part);
        for (int64_t r = 0; r < key_dim; r += 2) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const F32 key = F32::set(k[r + half]);
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) {
                    part[half][i] =
                        fma(F32::load(state + (r + half) * stride + i * kLanes), key, part[half][i]);
                }
            }
        }
        join(part, recalled);
    }

    // S <- decay S + k delta^T; out = S^T q; and with a next row its recalled = S^T next_k in the same pass.
    template <bool More>
    void advance(const float* k, const float* q, const float* next_k, F32 decay, const F32 delta[V],
                 F32 out[V], F32 recalled[V]) const {
        F32 part[2][V];
        F32 next[2][V];
        clear(part);
        clear(next);
        for (int64_t r = 0; r < key_dim; r += 2) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const F32 key = F32::set(k[r + half]);
                const F32 query = F32::set(q[r + half]);
                const F32 next_key = F32::set(More ? next_k[r + half] : 0.0f);
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) {
                    float* cell = state + (r + half) * stride + i * kLanes;
                    const F32 updated = fma(key, delta[i], F32::load(cell) * decay);
                    updated.store(cell);
                    part[half][i] = fma(updated, query, part[half][i]);
                    if constexpr (More) next[half][i] = fma(updated, next_key, next[half][i]);
                }
            }
        }
        join(part, out);
        if constexpr (More) join(next, recalled);
    }

  private:
    static void clear(F32 part[2][V]) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) part[0][i] = part[1][i] = F32::zero();
    }
    static void join(const F32 part[2][V], F32 sums[V]) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) sums[i] = part[0][i] + part[1][i];
    }
};

struct Scan {
    const DeltaTask* task;
    const float* decay;  // [rows]
    const float* beta;   // [rows]
};

// Columns [column, column + 16 V) of the state through all rows.
template <int V>
void scan_strip(const Scan& scan, int64_t column, const Strip<V>& strip) {
    const DeltaTask& t = *scan.task;
    const DeltaShape& s = t.op->shape;
    const int64_t key_head = t.head / (s.value_heads / s.key_heads);
    const auto query = [&](int64_t row) { return t.mixed + row * s.channels() + key_head * s.key_dim; };
    F32 recalled[V];
    strip.recall(query(0) + s.keys(), recalled);
    for (int64_t row = 0; row < t.rows; ++row) {
        const float* q = query(row);
        const float* k = q + s.keys();
        const float* v = t.mixed + row * s.channels() + 2 * s.keys() + t.head * s.value_dim + column;
        const F32 decay = F32::set(scan.decay[row]);
        F32 delta[V];
        F32 sums[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            delta[i] = (F32::load(v + i * kLanes) - recalled[i] * decay) * F32::set(scan.beta[row]);
        }
        if (row + 1 < t.rows) {
            strip.template advance<true>(k, q, query(row + 1) + s.keys(), decay, delta, sums, recalled);
        } else {
            strip.template advance<false>(k, q, nullptr, decay, delta, sums, recalled);
        }
        float* out = t.out + row * s.values() + t.head * s.value_dim + column;
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) sums[i].store(out + i * kLanes);
    }
}

// The strip's columns next to each other: rows a whole state apart would share few sets of the first-level
// cache.
template <int V>
void scan_packed(const Scan& scan, int64_t column) {
    const DeltaTask& t = *scan.task;
    const DeltaShape& s = t.op->shape;
    constexpr int64_t kColumns = V * kLanes;
    for (int64_t r = 0; r < s.key_dim; ++r) {
        std::memcpy(t.scratch + r * kColumns, t.state + r * s.value_dim + column, kColumns * sizeof(float));
    }
    scan_strip<V>(scan, column, {t.scratch, kColumns, s.key_dim});
    if (!t.advance) return;
    for (int64_t r = 0; r < s.key_dim; ++r) {
        std::memcpy(t.state + r * s.value_dim + column, t.scratch + r * kColumns, kColumns * sizeof(float));
    }
}

}  // namespace

void convolve(const DeltaRule& op, const float* projected, const float* history, int64_t rows, int64_t begin,
              int64_t end, float* mixed) {
    const DeltaShape& s = op.shape;
    const int64_t taps = s.conv_width - 1;
    const int64_t channels = s.channels();
    const float* weights = op.conv->data();  // [conv_width, channels]
    const auto input = [&](int64_t row) {
        return row < 0 ? history + (taps + row) * channels : projected + row * s.projected();
    };
    for (int64_t row = 0; row < rows; ++row) {
        int64_t c = begin;
        for (; c + kLanes <= end; c += kLanes) {
            F32 acc = F32::zero();
            for (int64_t t = 0; t < s.conv_width; ++t) {
                acc = fma(F32::load(input(row - taps + t) + c), F32::load(weights + t * channels + c), acc);
            }
            silu(acc).store(mixed + row * channels + c);
        }
        if (c < end) {
            float lanes[kLanes] = {};
            for (int64_t i = c; i < end; ++i) {
                for (int64_t t = 0; t < s.conv_width; ++t) {
                    lanes[i - c] =
                        std::fma(input(row - taps + t)[i], weights[t * channels + i], lanes[i - c]);
                }
            }
            silu(F32::load(lanes)).store(lanes);
            std::memcpy(mixed + row * channels + c, lanes, static_cast<size_t>(end - c) * sizeof(float));
        }
    }
}

void normalize_heads(const DeltaRule& op, float* mixed_row) {
    const DeltaShape& s = op.shape;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.key_dim));
    for (int64_t head = 0; head < 2 * s.key_heads; ++head) {
        float* x = mixed_row + head * s.key_dim;
        F32 squares = F32::zero();
        for (int64_t i = 0; i < s.key_dim; i += kLanes)
            squares = fma(F32::load(x + i), F32::load(x + i), squares);
        float inverse = 1.0f / std::sqrt(sum(squares) + kUnitEps);
        if (head < s.key_heads) inverse *= scale;
        for (int64_t i = 0; i < s.key_dim; i += kLanes) (F32::load(x + i) * F32::set(inverse)).store(x + i);
    }
}

void delta_rule(const DeltaTask& task) {
    const DeltaRule& op = *task.op;
    const DeltaShape& s = op.shape;
    constexpr int64_t kRows = 256;  // gates computed at a time
    float decay[kRows];
    float beta[kRows];
    const float rate = -std::exp((*op.a_log)[static_cast<size_t>(task.head)]);
    const float bias = (*op.dt_bias)[static_cast<size_t>(task.head)];
    for (int64_t begin = 0; begin < task.rows; begin += kRows) {
        DeltaTask part = task;
        part.rows = std::min(kRows, task.rows - begin);
        part.mixed += begin * s.channels();
        part.projected += begin * s.projected();
        part.out += begin * s.values();
        for (int64_t row = 0; row < part.rows; ++row) {
            const float* gates = part.projected + row * s.projected() + s.channels() + s.values();
            beta[row] = 1.0f / (1.0f + std::exp(-gates[task.head]));
            decay[row] = std::exp(rate * softplus(gates[s.value_heads + task.head] + bias));
        }
        const Scan scan{&part, decay, beta};
        int64_t column = 0;
        if (part.rows == 1 && part.advance) {  // contiguous passes over S when nothing is carried
            for (; column + 8 * kLanes <= s.value_dim; column += 8 * kLanes) {
                scan_strip<8>(scan, column, {part.state + column, s.value_dim, s.key_dim});
            }
        }
        for (; column + 4 * kLanes <= s.value_dim; column += 4 * kLanes) scan_packed<4>(scan, column);
        for (; column < s.value_dim; column += kLanes) scan_packed<1>(scan, column);
        for (int64_t row = 0; row < part.rows; ++row) {
            float* out = part.out + row * s.values() + task.head * s.value_dim;
            const float* z = part.projected + row * s.projected() + s.channels() + task.head * s.value_dim;
            rms_norm(out, op.norm->data(), op.eps, s.value_dim, out);
            for (int64_t i = 0; i < s.value_dim; i += kLanes) {
                (F32::load(out + i) * silu(F32::load(z + i))).store(out + i);
            }
        }
    }
}

}  // namespace LILY_ISA
}  // namespace lily::cpu
