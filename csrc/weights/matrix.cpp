#include "weights/matrix.h"

#include "base/error.h"

namespace lily {

size_t dtype_bytes(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32:
        case Dtype::u32:
            return 4;
        case Dtype::f16:
        case Dtype::bf16:
            return 2;
        case Dtype::u8:
        case Dtype::f8_e4m3:
            return 1;
    }
    return 0;
}

Dtype parse_dtype(const std::string& name) {
    if (name == "F32") return Dtype::f32;
    if (name == "F16") return Dtype::f16;
    if (name == "BF16") return Dtype::bf16;
    if (name == "U32") return Dtype::u32;
    if (name == "U8") return Dtype::u8;
    if (name == "F8_E4M3") return Dtype::f8_e4m3;
    throw CheckpointError("unsupported tensor dtype " + name +
                          " (supported: F32, F16, BF16, U32, U8, F8_E4M3)");
}

int64_t Matrix::row_bytes() const {
    return quantized() ? cols * bits / 8 : cols * static_cast<int64_t>(dtype_bytes(dtype));
}

int64_t Matrix::scale_row_bytes() const {
    if (!quantized()) return 0;
    const int64_t width = format == Format::affine ? static_cast<int64_t>(dtype_bytes(dtype)) : 1;
    return cols / group * width;
}

Matrix Matrix::rows_from(int64_t first, int64_t count) const {
    Matrix view = *this;
    view.rows = count;
    view.data = data + first * row_bytes();
    if (scales) view.scales = scales + first * scale_row_bytes();
    if (biases) view.biases = biases + first * scale_row_bytes();
    return view;
}

}  // namespace lily
