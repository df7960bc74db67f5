#include "backend/metal/weights.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>

#include "backend/metal/choices.h"
#include "base/error.h"

namespace lily::metal {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kMostPerBuffer = size_t{4} << 30;
constexpr size_t kPiece = size_t{8} << 20;  // of a copy, for one reader at a time
constexpr unsigned kMostReaders = 8;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::string format_name(const Matrix& m) {
    switch (m.format) {
        case Format::plain:
            return m.dtype == Dtype::bf16 ? "bf16" : m.dtype == Dtype::f16 ? "fp16" : "fp32";
        case Format::affine:
            return "affine " + std::to_string(m.bits) + "-bit in groups of " + std::to_string(m.group);
        case Format::mxfp4:
            return "mxfp4";
        case Format::mxfp8:
            return "mxfp8";
        case Format::nvfp4:
            return "nvfp4";
    }
    return "unknown";
}

std::string scale_name(Dtype dtype) {
    return dtype == Dtype::bf16 ? "bfloat" : dtype == Dtype::f16 ? "half" : "float";
}

}  // namespace

NumberFormat number_format(const Matrix& m) {
    if (m.cols % 32 != 0) {
        throw BackendError(m.label + " has rows of " + std::to_string(m.cols) +
                           " numbers; the Metal backend needs multiples of 32 (backend='cpu' runs it)");
    }
    switch (m.format) {
        case Format::plain:
            return {m.dtype == Dtype::bf16 ? "b16" : m.dtype == Dtype::f16 ? "f16" : "f32", "bfloat"};
        case Format::affine:
            if (has_kernels(m.bits, m.group)) return {"b" + std::to_string(m.bits), scale_name(m.dtype)};
            break;
        case Format::mxfp4:
        case Format::mxfp8:
        case Format::nvfp4:
            return {format_name(m), "uchar"};
    }
    throw BackendError(m.label + " is stored as " + format_name(m) +
                       ", for which the Metal backend has no kernels (backend='cpu' runs it)");
}

bool Weights::same_format(const Matrix& a, const Matrix& b) {
    return a.format == b.format && a.dtype == b.dtype && a.bits == b.bits && a.group == b.group &&
           a.cols == b.cols;
}

Placed& Weights::place(size_t bytes) {
    Placed& placed = vectors_.emplace_back();
    placed.bytes = bytes;
    pieces_.push_back(&placed);
    return placed;
}

DeviceMatrix& Weights::add(const Matrix& sample, int64_t rows) {
    DeviceMatrix& m = matrices_.emplace_back();
    m.format = number_format(sample);
    m.group_shift = sample.quantized() ? static_cast<uint32_t>(std::countr_zero(unsigned(sample.group))) : 5;
    m.rows = static_cast<uint32_t>(rows);
    m.cols = static_cast<uint32_t>(sample.cols);
    return m;
}

void Weights::copy(const Matrix& matrix, DeviceMatrix& to, int64_t first_row) {
    const auto part = [&](const std::byte* from, int64_t row_bytes, Placed& target) {
        if (!from) return;
        copies_.push_back({from, static_cast<size_t>(matrix.rows * row_bytes), &target,
                           static_cast<size_t>(first_row * row_bytes)});
    };
    part(matrix.data, matrix.row_bytes(), to.codes);
    part(matrix.scales, matrix.scale_row_bytes(), to.scales);
    part(matrix.biases, matrix.scale_row_bytes(), to.biases);
}

const DeviceMatrix* Weights::stack_experts(std::span<const ExpertMatrices* const> parts) {
    std::vector<const std::byte*> data;
    for (const ExpertMatrices* part : parts) {
        for (const Matrix& matrix : *part) data.push_back(matrix.data);
    }
    const DeviceMatrix*& held = stacks_[std::move(data)];
    if (held) return held;
    const Matrix& sample = parts[0]->front();
    const size_t count = parts[0]->size();
    int64_t rows = 0;
    for (const ExpertMatrices* part : parts) rows += part->front().rows;
    for (const ExpertMatrices* part : parts) {
        for (const Matrix& matrix : *part) {
            if (!same_format(sample, matrix)) {
                throw BackendError(sample.label + " (" + format_name(sample) + ") and " + matrix.label +
                                   " (" + format_name(matrix) +
                                   ") are read together by the Metal backend and must have one format "
                                   "(backend='cpu' runs it)");
            }
        }
    }
    DeviceMatrix& m = add(sample, rows);
    const auto all_rows = static_cast<int64_t>(count) * rows;
    m.codes.bytes = static_cast<size_t>(all_rows * sample.row_bytes());
    m.scales.bytes = static_cast<size_t>(all_rows * sample.scale_row_bytes());
    m.biases.bytes = sample.biases ? m.scales.bytes : 0;
    m.matrix_bytes = (m.codes.bytes + m.scales.bytes + m.biases.bytes) / count;
    pieces_.insert(pieces_.end(), {&m.codes, &m.scales, &m.biases});
    int64_t row = 0;
    for (size_t i = 0; i < count; ++i) {
        for (const ExpertMatrices* part : parts) {
            copy((*part)[i], m, row);
            row += (*part)[i].rows;
        }
    }
    held = &m;
    return held;
}

const DeviceMatrix* Weights::stack(std::span<const Matrix> matrices) {
    std::vector<ExpertMatrices> single;
    std::vector<const ExpertMatrices*> parts;
    single.reserve(matrices.size());
    for (const Matrix& matrix : matrices) parts.push_back(&single.emplace_back(1, matrix));
    return stack_experts(parts);
}

std::vector<const DeviceMatrix*> Weights::stack_by_format(std::span<const Matrix> matrices) {
    std::vector<const DeviceMatrix*> stacks;
    for (size_t first = 0; first < matrices.size();) {
        size_t end = first + 1;
        while (end < matrices.size() && same_format(matrices[first], matrices[end])) ++end;
        stacks.push_back(stack(matrices.subspan(first, end - first)));
        first = end;
    }
    return stacks;
}

const DeviceMatrix* Weights::stack_lists(std::initializer_list<const std::vector<Matrix>*> lists) {
    std::vector<Matrix> matrices;
    for (const std::vector<Matrix>* list : lists) matrices.insert(matrices.end(), list->begin(), list->end());
    return matrices.empty() ? nullptr : stack(matrices);
}

const Placed* Weights::vector(std::span<const float> values) {
    const std::vector<float>& kept = floats_.emplace_back(values.begin(), values.end());
    Placed& placed = place(kept.size() * sizeof(float));
    copies_.push_back({reinterpret_cast<const std::byte*>(kept.data()), placed.bytes, &placed, 0});
    return &placed;
}

uint64_t Weights::lay_out(const Device& device) {
    const size_t most = std::min<size_t>(kMostPerBuffer, device.largest_buffer());
    for (Placed* piece : pieces_) {
        const size_t bytes = aligned(std::max<size_t>(piece->bytes, 1));
        if (sizes_.empty() || sizes_.back() + bytes > most) sizes_.push_back(0);
        buffer_of_.push_back(sizes_.size() - 1);
        piece->offset = sizes_.back();
        sizes_.back() += bytes;
        total_ += bytes;
    }
    uint64_t on_gpu = 0;
    for (const size_t bytes : sizes_) on_gpu += Device::whole_pages(bytes);
    return on_gpu;
}

void Weights::load(Device& device) {
    device.require(total_, "the weights");
    for (const size_t bytes : sizes_) buffers_.push_back(device.allocate(bytes, "weights"));
    for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i]->buffer = &buffers_[buffer_of_[i]];
    fill();
    copies_.clear();
    floats_.clear();
}

void Weights::fill() const {
    struct Piece {
        const Copy* copy;
        size_t begin, bytes;
    };
    std::vector<Piece> pieces;
    for (const Copy& copy : copies_) {
        for (size_t begin = 0; begin < copy.bytes; begin += kPiece) {
            pieces.push_back({&copy, begin, std::min(kPiece, copy.bytes - begin)});
        }
    }
    std::atomic<size_t> next{0};
    const auto read = [&] {
        for (size_t i = next++; i < pieces.size(); i = next++) {
            const auto& [copy, begin, bytes] = pieces[i];
            std::byte* to = copy->to->buffer->contents() + copy->to->offset + copy->offset;
            std::memcpy(to + begin, copy->from + begin, bytes);
        }
    };
    std::vector<std::thread> readers;
    const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMostReaders);
    for (unsigned i = 1; i < count; ++i) readers.emplace_back(read);
    read();
    for (std::thread& reader : readers) reader.join();
}

}  // namespace lily::metal
