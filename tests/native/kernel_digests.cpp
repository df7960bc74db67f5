// Runs every kernel of one table on fixed inputs and prints a digest of each output's bits.
//
//   kernel_digests NAME     status 2 if this machine can't run the table
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/kernels.h"
#include "backend/cpu/quantized_rows.h"
#include "base/numeric.h"
#include "state/kv_cache.h"

namespace {

using namespace lily;
using namespace lily::cpu;

uint64_t next_word() {
    static uint64_t state = 0x9e3779b97f4a7c15ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// Between -1 and 1.
float next_float() {
    return static_cast<float>(static_cast<int64_t>(next_word() >> 40) - (1 << 23)) * 0x1p-23f;
}

std::vector<float> floats(int64_t count, float size = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = next_float() * size;
    return values;
}

Vector vector_of(int64_t count) { return std::make_shared<const std::vector<float>>(floats(count)); }

void report(const std::string& what, const void* data, size_t bytes) {
    uint64_t digest = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; ++i) {
        digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
    }
    std::printf("%s: %016llx\n", what.c_str(), static_cast<unsigned long long>(digest));
}

void report(const std::string& what, const std::vector<float>& values) {
    report(what, values.data(), values.size() * sizeof(float));
}

struct Stored {  // a matrix with its bytes
    Matrix matrix;
    std::vector<std::byte> codes, scales, biases;
};

Stored random_matrix(Format format, int bits, int group, Dtype dtype, int64_t rows, int64_t cols) {
    Stored stored;
    Matrix& w = stored.matrix;
    w.format = format;
    w.bits = bits;
    w.group = group;
    w.dtype = dtype;
    w.rows = rows;
    w.cols = cols;
    stored.codes.resize(static_cast<size_t>(rows * w.row_bytes()));
    for (std::byte& byte : stored.codes) byte = static_cast<std::byte>(next_word() >> 32);
    const auto fill = [&](std::vector<std::byte>& bytes, size_t count, Dtype kind) {
        bytes.resize(count * dtype_bytes(kind));
        for (size_t i = 0; i < count; ++i) {
            const float value = next_float();
            const uint16_t half =
                kind == Dtype::f16 ? static_cast<uint16_t>(next_word() & 0x3bff) : float_to_bf16(value);
            if (kind == Dtype::f32) {
                std::memcpy(bytes.data() + 4 * i, &value, 4);
            } else {
                std::memcpy(bytes.data() + 2 * i, &half, 2);
            }
        }
    };
    if (format == Format::plain) {
        fill(stored.codes, static_cast<size_t>(rows * cols), dtype);
    } else if (format == Format::affine) {
        fill(stored.scales, static_cast<size_t>(rows * cols / group), dtype);
        fill(stored.biases, static_cast<size_t>(rows * cols / group), dtype);
    } else {
        stored.scales.resize(static_cast<size_t>(rows * cols / group));
        for (std::byte& byte : stored.scales) byte = static_cast<std::byte>(112 + next_word() % 16);
    }
    w.data = stored.codes.data();
    w.scales = stored.scales.empty() ? nullptr : stored.scales.data();
    w.biases = stored.biases.empty() ? nullptr : stored.biases.data();
    return stored;
}

void matrices(const Kernels& kernels) {
    struct Case {
        const char* name;
        Format format;
        int bits, group;
        Dtype dtype;
        int64_t cols;
    };
    std::vector<Case> cases;
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
        for (const int group : {32, 64, 128}) {
            cases.push_back({"affine", Format::affine, bits, group, Dtype::bf16, 384});
        }
    }
    cases.push_back({"affine", Format::affine, 4, 32, Dtype::f16, 96});
    cases.push_back({"affine", Format::affine, 4, 64, Dtype::f32, 192});
    cases.push_back({"mxfp4", Format::mxfp4, 4, 32, Dtype::u8, 384});
    cases.push_back({"nvfp4", Format::nvfp4, 4, 16, Dtype::u8, 160});
    cases.push_back({"mxfp8", Format::mxfp8, 8, 32, Dtype::u8, 96});
    cases.push_back({"f32", Format::plain, 0, 0, Dtype::f32, 72});
    cases.push_back({"bf16", Format::plain, 0, 0, Dtype::bf16, 72});
    cases.push_back({"f16", Format::plain, 0, 0, Dtype::f16, 72});
    for (const Case& c : cases) {
        const Stored stored = random_matrix(c.format, c.bits, c.group, c.dtype, 44, c.cols);
        const bool integers = c.format != Format::plain && c.format != Format::mxfp8;
        for (const int64_t rows : {1, 2, 3, 5, 7, 8, 9, 20}) {
            const std::vector<float> values = floats(rows * c.cols, 3.0f);
            QuantizedRows x;
            x.shape(values.data(), rows, c.cols, integers, rows <= kMaxByteRows);
            for (int64_t row = 0; integers && row < rows; ++row) x.quantize(kernels, row);
            std::vector<float> out(static_cast<size_t>(rows * 48));
            std::vector<float> scratch(static_cast<size_t>(kernels.matrix_scratch_floats(c.cols)));
            for (const bool exact : {false, true}) {
                if (!integers && !exact) continue;
                for (int64_t first = 0; first < 44; first += kMaxPanels * kPanel) {
                    MatrixTask task{.weight = &stored.matrix,
                                    .first_row = first,
                                    .panels = first == 0 ? 2 : 1,
                                    .x = &x.view(),
                                    .row_index = nullptr,
                                    .count = rows,
                                    .out = out.data() + first,
                                    .out_stride = 48,
                                    .scratch = scratch.data()};
                    exact ? kernels.matrix_float(task) : kernels.matrix_integer(task);
                }
                report(std::string(exact ? "matrix_float " : "matrix_integer ") + c.name + " " +
                           std::to_string(c.bits) + " bits, groups of " + std::to_string(c.group) + ", " +
                           std::to_string(rows) + " rows",
                       out);
            }
        }
        std::vector<float> row(static_cast<size_t>(c.cols));
        kernels.read_row(stored.matrix, 17, row.data());
        report(std::string("read_row ") + c.name, row);
    }
}

void rows(const Kernels& kernels) {
    for (const int64_t size : {16, 100, 2048}) {
        const std::vector<float> x = floats(size, 4.0f);
        const std::vector<float> y = floats(size);
        std::vector<float> out(static_cast<size_t>(size));
        kernels.rms_norm(x.data(), y.data(), 1e-6f, size, out.data());
        report("rms_norm " + std::to_string(size), out);
        kernels.swiglu(x.data(), y.data(), size, out.data());
        report("swiglu " + std::to_string(size), out);
        kernels.add_scaled(x.data(), 0.37f, size, out.data());
        report("add_scaled " + std::to_string(size), out);
    }
}

void delta(const Kernels& kernels) {
    for (const int64_t width : {32, 80, 128}) {
        const DeltaShape s{2, 4, 32, width, 4};
        const DeltaRule op{
            0, s, vector_of(4 * s.channels()), vector_of(4), vector_of(4), vector_of(width), 1e-6f, 0, 0};
        for (const int64_t count : {1, 5}) {
            const std::vector<float> projected = floats(count * s.projected(), 2.0f);
            const std::vector<float> history = floats(3 * s.channels());
            std::vector<float> mixed(static_cast<size_t>(count * s.channels()));
            kernels.convolve(op, projected.data(), history.data(), count, 0, s.channels(), mixed.data());
            for (int64_t row = 0; row < count; ++row) {
                kernels.normalize_heads(op, mixed.data() + row * s.channels());
            }
            report("convolve " + std::to_string(width), mixed);
            std::vector<float> state = floats(4 * 32 * width);
            std::vector<float> out(static_cast<size_t>(count * s.values()));
            std::vector<float> scratch(static_cast<size_t>(delta_scratch_floats(s)));
            for (int64_t head = 0; head < 4; ++head) {
                kernels.delta_rule({&op, head, mixed.data(), projected.data(), count,
                                    state.data() + head * 32 * width, out.data(), scratch.data()});
            }
            report("delta_rule " + std::to_string(width), out);
            report("delta_rule " + std::to_string(width) + " state", state);
        }
    }
}

void attention(const Kernels& kernels) {
    const std::pair<const char*, KvDtype> kinds[] = {
        {"bf16", KvDtype::bf16}, {"f32", KvDtype::f32}, {"int8", KvDtype::int8}};
    for (const auto& [name, dtype] : kinds) {
        for (const int64_t heads : {2, 6, 24}) {
            const AttentionShape s{heads, 2, 48, 32, 1e6};
            const RotaryAppend op{0, s, vector_of(48), vector_of(48), 1e-6f, 0};
            const int64_t length = 1100;
            KvLayout layout;
            layout.layers = 1;
            layout.kv_heads = 2;
            layout.head_dim = 48;
            layout.dtype = dtype;
            KvCache cache(layout);
            cache.reserve(0, length);
            std::vector<float> projected = floats(length * s.projected(), 2.0f);
            const std::vector<float> angles = floats(s.rotary_dim);
            for (int64_t row = 0; row < length; ++row) {
                kernels.rotary_append(op, projected.data() + row * s.projected(), angles.data(), row, cache);
            }
            report(std::string("rotary_append ") + name, projected);
            const auto [keys, values] = cache.read(0, length);
            report(std::string("keys ") + name, keys);
            report(std::string("values ") + name, values);
            const int64_t floats_each = 3 * s.heads / 2 * attention_floats(s);
            std::vector<float> joined(static_cast<size_t>(floats_each)),
                part(static_cast<size_t>(floats_each));
            std::vector<float> scratch(static_cast<size_t>(kernels.attention_scratch_floats(s, 3)));
            std::vector<float> out(static_cast<size_t>(length * s.queries()));
            for (const int64_t first : {0, 63, 700, 1022, 1097}) {
                for (int64_t head = 0; head < 2; ++head) {
                    const AttentionTask task{&s, &cache, 0, head, first, projected.data(), 3, first, true};
                    kernels.attend_span(task, 0, joined.data(), scratch.data());
                    if (task.spans() > 1) {
                        kernels.attend_span(task, 1, part.data(), scratch.data());
                        kernels.join_span(task, 1, part.data(), joined.data());
                    }
                    kernels.finish_attention(task, joined.data(), out.data());
                }
            }
            report(std::string("attention ") + name + ", " + std::to_string(heads) + " heads", out);
        }
    }
}

}  // namespace

int main(int, char** arguments) {
    const Kernels* kernels = find_kernels(arguments[1]);
    if (!kernels) return 2;
    matrices(*kernels);
    rows(*kernels);
    delta(*kernels);
    attention(*kernels);
}
