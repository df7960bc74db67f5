// The sequence mixers: convolution and delta rule, rotary embedding, attention.
#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_backend.h"

namespace lily::cpu {
namespace {

constexpr int64_t kConvPiece = 256;    // channels per work item
constexpr int64_t kAttentionRows = 8;  // most query rows per work item

// The last `taps` inputs of some channels of the convolution, oldest first.
void remember_inputs(const float* projected, int64_t stride, int64_t rows, int64_t taps, int64_t channels,
                     int64_t begin, int64_t end, float* history) {
    const auto bytes = static_cast<size_t>(end - begin) * sizeof(float);
    for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t row = rows - taps + tap;
        const float* from = row < 0 ? history + (taps + row) * channels : projected + row * stride;
        std::memcpy(history + tap * channels + begin, from + begin, bytes);
    }
}

}  // namespace

void CpuBackend::apply(const DeltaRule& op, const Batch& batch, int64_t rows) {
    const int64_t floats = op.shape.projected();
    for (const Segment& segment : batch.segments) {
        if (!segment.tape) continue;
        static_cast<DeltaTape*>(segment.tape)
            ->keep(op.state, data(op.in) + segment.first_row * floats, segment.rows * floats);
    }
    scan(op, batch.segments, data(op.in), rows);
}

void CpuBackend::advance(std::span<const Op> ops, Sequence& sequence, const Tape& tape, int64_t rows) {
    const Segment segment{&sequence, 0, rows};
    for (const Op& op : ops) {
        if (const auto* rule = std::get_if<DeltaRule>(&op)) {
            scan(*rule, {&segment, 1}, static_cast<const DeltaTape&>(tape).rows(rule->state), rows);
        }
    }
}

void CpuBackend::scan(const DeltaRule& op, std::span<const Segment> segments, const float* in, int64_t rows) {
    const DeltaShape& s = op.shape;
    const int64_t taps = s.conv_width - 1;
    mixed_.ensure(static_cast<size_t>(rows * s.channels()));
    const auto count = static_cast<int64_t>(segments.size());
    const int64_t strips = (s.channels() + kConvPiece - 1) / kConvPiece;
    const auto convolve = [&](const Piece& piece) {
        for (int64_t item = piece.begin; item < piece.end; ++item) {
            const Segment& segment = segments[static_cast<size_t>(item / strips)];
            const int64_t begin = item % strips * kConvPiece;
            const int64_t end = std::min(begin + kConvPiece, s.channels());
            const float* projected = in + segment.first_row * s.projected();
            float* history = segment.sequence->recurrent().conv(op.state);
            kernels_.convolve(op, projected, history, segment.rows, begin, end,
                              mixed_.data() + segment.first_row * s.channels());
            if (segment.tape) continue;
            remember_inputs(projected, s.projected(), segment.rows, taps, s.channels(), begin, end, history);
        }
    };
    spread(count * strips, 1, 2 * s.conv_width * rows * s.channels() * 4, convolve);
    prepare_rows(rows,
                 [&](int64_t row) { kernels_.normalize_heads(op, mixed_.data() + row * s.channels()); });
    const int64_t state = s.key_dim * s.value_dim;
    spread(count * s.value_heads, 1, s.value_heads * state * 4 * rows, [&](const Piece& piece) {
        for (int64_t item = piece.begin; item < piece.end; ++item) {
            const Segment& segment = segments[static_cast<size_t>(item / s.value_heads)];
            const int64_t head = item % s.value_heads;
            kernels_.delta_rule({.op = &op,
                                 .head = head,
                                 .mixed = mixed_.data() + segment.first_row * s.channels(),
                                 .projected = in + segment.first_row * s.projected(),
                                 .rows = segment.rows,
                                 .state = segment.sequence->recurrent().matrices(op.state) + head * state,
                                 .out = data(op.out) + segment.first_row * s.values(),
                                 .scratch = scratch(piece.thread, delta_scratch_floats(s)),
                                 .advance = segment.tape == nullptr});
        }
    });
}

void CpuBackend::prepare_angles(const AttentionShape& shape, const Batch& batch, int64_t rows) {
    const int64_t pairs = shape.rotary_dim / 2;
    angles_.ensure(static_cast<size_t>(rows * shape.rotary_dim));
    std::vector<double> frequencies;
    for (int64_t i = 0; i < pairs; ++i) {
        frequencies.push_back(std::pow(
            shape.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rotary_dim)));
    }
    for (const Segment& segment : batch.segments) {
        prepare_rows(segment.rows, [&](int64_t row) {
            const auto position = static_cast<double>(segment.sequence->length() + row);
            float* cosine = angles_.data() + (segment.first_row + row) * shape.rotary_dim;
            for (int64_t i = 0; i < pairs; ++i) {
                const double angle = position * frequencies[static_cast<size_t>(i)];
                cosine[i] = static_cast<float>(std::cos(angle));
                cosine[pairs + i] = static_cast<float>(std::sin(angle));
            }
        });
    }
    angles_of_ = {shape.rope_theta, shape.rotary_dim};
}

void CpuBackend::apply(const RotaryAppend& op, const Batch& batch, int64_t rows) {
    const AttentionShape& s = op.shape;
    if (angles_of_ != Rotation{s.rope_theta, s.rotary_dim}) prepare_angles(s, batch, rows);
    for (const Segment& segment : batch.segments) {
        const int64_t position = segment.sequence->length();
        prepare_rows(segment.rows, [&](int64_t i) {
            const int64_t row = segment.first_row + i;
            kernels_.rotary_append(op, data(op.projected) + row * s.projected(),
                                   angles_.data() + row * s.rotary_dim, position + i, segment.sequence->kv());
        });
    }
}

void CpuBackend::apply(const Attend& op, const Batch& batch, int64_t rows) {
    const AttentionShape& s = op.shape;
    // Fewer rows per task where there would be too few tasks to share out.
    const int64_t per_task =
        std::clamp<int64_t>(rows * s.kv_heads / (4 * pool_.threads()), 1, kAttentionRows);
    attention_tasks_.clear();
    attention_items_.clear();
    int64_t bytes = 0;
    for (const Segment& segment : batch.segments) {
        const int64_t length = segment.sequence->length();
        bytes += 4 * s.keys() * (length + segment.rows) * segment.rows;
        for (int64_t row = 0; row < segment.rows; row += per_task) {
            for (int64_t head = 0; head < s.kv_heads; ++head) {
                attention_tasks_.push_back({.shape = &s,
                                            .cache = &segment.sequence->kv(),
                                            .layer = op.cache,
                                            .kv_head = head,
                                            .first_row = segment.first_row + row,
                                            .projected = data(op.projected),
                                            .rows = std::min(per_task, segment.rows - row),
                                            .position = length + row,
                                            .prefetch = switches_.prefetch});
            }
        }
    }
    const auto tasks = static_cast<int64_t>(attention_tasks_.size());
    const int64_t floats = per_task * s.heads / s.kv_heads * attention_floats(s);
    if (switches_.attention_spans && tasks < 4 * pool_.threads()) return attend_by_spans(op, floats, bytes);
    const int64_t room = attention_kernels_.attention_scratch_floats(s, per_task);
    spread(tasks, 1, bytes, [&](const Piece& piece) {
        float* joined = scratch(piece.thread, room + 2 * floats);
        float* partials = joined + floats;
        for (int64_t item = piece.begin; item < piece.end; ++item) {
            const AttentionTask& task = attention_tasks_[static_cast<size_t>(item)];
            attention_kernels_.attend_span(task, 0, joined, partials + floats);
            for (int64_t span = 1; span < task.spans(); ++span) {
                attention_kernels_.attend_span(task, span, partials, partials + floats);
                attention_kernels_.join_span(task, span, partials, joined);
            }
            attention_kernels_.finish_attention(task, joined, data(op.out));
        }
    });
}

void CpuBackend::attend_by_spans(const Attend& op, int64_t floats, int64_t bytes) {
    const AttentionShape& s = op.shape;
    for (size_t i = 0; i < attention_tasks_.size(); ++i) {
        for (int64_t span = 0; span < attention_tasks_[i].spans(); ++span)
            attention_items_.push_back({i, span});
    }
    const auto items = static_cast<int64_t>(attention_items_.size());
    partials_.ensure(static_cast<size_t>(items * floats));
    const int64_t room = attention_kernels_.attention_scratch_floats(s, kAttentionRows);
    spread(items, 1, bytes, [&](const Piece& piece) {
        for (int64_t item = piece.begin; item < piece.end; ++item) {
            const auto& [task, span] = attention_items_[static_cast<size_t>(item)];
            attention_kernels_.attend_span(attention_tasks_[task], span, partials_.data() + item * floats,
                                           scratch(piece.thread, room));
        }
    });
    float* joined = partials_.data();
    for (int64_t item = 0; item < items; ++item) {
        const auto& [index, span] = attention_items_[static_cast<size_t>(item)];
        const AttentionTask& task = attention_tasks_[index];
        float* partials = partials_.data() + item * floats;
        if (span == 0) joined = partials;
        if (span > 0) attention_kernels_.join_span(task, span, partials, joined);
        if (span + 1 == task.spans()) attention_kernels_.finish_attention(task, joined, data(op.out));
    }
}

}  // namespace lily::cpu
