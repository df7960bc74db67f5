// Metal 4 tensor operations: matmul2d over tensors in memory and over registers, in float.
//
// Registers of one simdgroup are 16x16 fragments, eight elements a lane, in the order that MLX relies on;
// where a matrix has more than two of them, or belongs to several simdgroups, the order is not known and
// another one is used here, so that code which takes it for granted fails. Operands and results cover only
// what lily needs: half, bfloat and float.
#pragma once
#include "collective.hpp"

namespace msl::metal {
inline constexpr int dynamic_extent = -1;

template <class I, int E0, int E1>
struct extents {
    I sizes[2] = {I(E0), I(E1)};
    extents() = default;
    extents(I first, I second) : sizes{first, second} {}
    I extent(int i) const { return sizes[i]; }
    static constexpr int first = E0, second = E1;
};
namespace detail {
template <class I, int R>
struct DynamicExtents;
template <class I>
struct DynamicExtents<I, 2> {
    using type = extents<I, dynamic_extent, dynamic_extent>;
};
}  // namespace detail
template <class I, int R>
using dextents = typename detail::DynamicExtents<I, R>::type;

struct tensor_inline {};

// A view; the first extent is that of the neighbouring elements.
template <class T, class Extents, class Kind>
struct tensor {
    static_assert(!std::is_const_v<T>, "tensors have no const elements: cast the pointer");
    using element_type = T;
    using extents_type = Extents;
    T* data;
    Extents shape;
    long strides[2];
    tensor(T* p, Extents e) : data(p), shape(e), strides{1, long(e.extent(0))} {}
    tensor(T* p, Extents e, array<int, 2> s) : data(p), shape(e), strides{s[0], s[1]} {}
    Extents extents() const { return shape; }
    auto slice(int x, int y) const {
        tensor<T, dextents<int, 2>, Kind> part(
            data + x * strides[0] + y * strides[1],
            dextents<int, 2>(int(shape.extent(0)) - x, int(shape.extent(1)) - y));
        part.strides[0] = strides[0], part.strides[1] = strides[1];
        return part;
    }
    template <int W, int H>
    auto slice(int x, int y) const {
        using Part = metal::extents<int, W, H>;
        tensor<T, Part, Kind> part(
            data + x * strides[0] + y * strides[1],
            Part(W < 0 ? int(shape.extent(0)) - x : W, H < 0 ? int(shape.extent(1)) - y : H));
        part.strides[0] = strides[0], part.strides[1] = strides[1];
        return part;
    }
    T* at(int x, int y) const { return data + x * strides[0] + y * strides[1]; }
};

struct execution_thread {
    static constexpr int simdgroups = 0;
};
struct execution_simdgroup {
    static constexpr int simdgroups = 1;
};
template <int N>
struct execution_simdgroups {
    static constexpr int simdgroups = N;
};

namespace detail {
struct TensorPosition {
    int row, column;
};

// Which element of an R x C matrix is element i of a lane.
template <int R, int C, int SIMDGROUPS>
struct TensorLayout {
    static constexpr bool fragments =
        SIMDGROUPS == 1 && R % 16 == 0 && C % 16 == 0 && (R == 16 || C == 16) && R * C <= 512;
    static constexpr int band = R % SIMDGROUPS == 0 ? R / SIMDGROUPS : R;  // rows of a simdgroup
    static constexpr int owners = R % SIMDGROUPS == 0 ? 1 : SIMDGROUPS;    // of a band
    static constexpr int capacity = (band * C + 32 * owners - 1) / (32 * owners);
    static TensorPosition position(int simdgroup, int lane, int i) {
        if constexpr (fragments) {
            int quad = lane >> 2, tile = i / 8, e = i % 8;
            int row = ((quad & 4) | ((lane >> 1) & 3)) + 8 * (e >> 2);
            int column = ((quad & 2) | (lane & 1)) * 4 + (e & 3);
            return {row + (C == 16 ? 16 * tile : 0), column + (C == 16 ? 0 : 16 * tile)};
        }
        int place = i * 32 * owners + (owners > 1 ? simdgroup * 32 : 0) + (31 - lane);
        return {(owners > 1 ? 0 : simdgroup * band) + place / C, place % C};
    }
    static bool valid(int simdgroup, int lane, int i) {
        TensorPosition at = position(simdgroup, lane, i);
        return at.row < (owners > 1 ? R : (simdgroup + 1) * band);
    }
};

template <class T>
inline constexpr bool is_tensor_element_v =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
}  // namespace detail

// A matrix that is spread over the registers of the threads of a scope; A and B are the operands' types that
// it was made for.
template <class T, int R, int C, int SIMDGROUPS, class A, class B>
struct cooperative_tensor {
    using element_type = T;
    using left_type = A;
    using right_type = B;
    using layout = detail::TensorLayout<R, C, SIMDGROUPS>;
    T elements[layout::capacity];
    cooperative_tensor() { memset((void*)elements, 0xFF, sizeof elements); }  // NaN until written
    static constexpr uint16_t get_capacity() { return layout::capacity; }
    T& operator[](uint16_t i) { return elements[i]; }
    const T& operator[](uint16_t i) const { return elements[i]; }
    bool is_valid_element(uint16_t i) const {
        return layout::valid(metalsim::current_thread->simdgroup_index, metalsim::current_thread->lane, i);
    }
    array<int, 2> get_multidimensional_index(uint16_t i) const {
        auto at =
            layout::position(metalsim::current_thread->simdgroup_index, metalsim::current_thread->lane, i);
        return {at.column, at.row};
    }
    template <class Tensor>
    void store(const Tensor& target) const {
        static_assert(std::is_same_v<typename Tensor::element_type, T>, "store converts no elements");
        for (int i = 0; i < layout::capacity; i++) {
            auto at = get_multidimensional_index(i);
            if (is_valid_element(i) && at[0] < target.shape.extent(0) && at[1] < target.shape.extent(1))
                *target.at(at[0], at[1]) = elements[i];
        }
    }
};

namespace detail {
template <class T>
inline constexpr bool is_cooperative_v = false;
template <class T, int R, int C, int S, class A, class B>
inline constexpr bool is_cooperative_v<cooperative_tensor<T, R, C, S, A, B>> = true;

// Element types of what a cooperative tensor is made for: an element, a tensor or a cooperative tensor.
template <class T, class = void>
struct TensorElement {
    using type = std::remove_cv_t<T>;
};
template <class T>
struct TensorElement<T, std::void_t<typename T::element_type>> {
    using type = typename T::element_type;
};
template <class T>
using tensor_element_t = typename TensorElement<std::remove_cv_t<std::remove_reference_t<T>>>::type;
}  // namespace detail
}  // namespace msl::metal

namespace msl::mpp::tensor_ops {
struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int m, int n, int k = metal::dynamic_extent, bool transpose_left = false,
                                  bool transpose_right = false, bool relaxed_precision = false,
                                  mode matmul_mode = mode::multiply)
        : m(m),
          n(n),
          k(k),
          transpose_left(transpose_left),
          transpose_right(transpose_right),
          relaxed_precision(relaxed_precision),
          matmul_mode(matmul_mode) {}
    // Template arguments of C++17 are no structures.
    constexpr operator unsigned long() const {
        return (unsigned long)m | (unsigned long)n << 16 | (unsigned long)(k < 0 ? 0 : k) << 32 |
               (unsigned long)transpose_left << 48 | (unsigned long)transpose_right << 49 |
               (unsigned long)relaxed_precision << 50 |
               (unsigned long)(matmul_mode == mode::multiply_accumulate) << 51;
    }
};

template <unsigned long DESCRIPTOR, class Scope>
struct matmul2d {
    static constexpr int m = DESCRIPTOR & 0xFFFF, n = DESCRIPTOR >> 16 & 0xFFFF,
                         k = DESCRIPTOR >> 32 & 0xFFFF;
    static constexpr bool transpose_left = DESCRIPTOR >> 48 & 1, transpose_right = DESCRIPTOR >> 49 & 1;
    static constexpr bool relaxed = DESCRIPTOR >> 50 & 1, accumulate = DESCRIPTOR >> 51 & 1;
    static constexpr int simdgroups = Scope::simdgroups;
    static_assert(m > 0 && n > 0 && m % 8 == 0 && n % 8 == 0 && (m % 16 == 0 || n % 16 == 0),
                  "matmul2d: m and n are multiples of 8, one of them of 16");
    static_assert(simdgroups > 0, "matmul2d in one thread is not simulated");

    template <class A, class B, class C>
    using Left = metal::cooperative_tensor<A, transpose_left ? k : m, transpose_left ? m : k, 1, A, B>;
    template <class A, class B, class C>
    using Right = metal::cooperative_tensor<B, transpose_right ? n : k, transpose_right ? k : n, 1, A, B>;
    template <class A, class B, class C>
    using Destination = metal::cooperative_tensor<C, m, n, simdgroups, metal::detail::tensor_element_t<A>,
                                                  metal::detail::tensor_element_t<B>>;

    template <class A, class B, class C>
    Left<A, B, C> get_left_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "input cooperative tensors need execution_simdgroup");
        static_assert(k > 0 && k % 16 == 0, "input cooperative tensors need a static k, a multiple of 16");
        return {};
    }
    template <class A, class B, class C>
    Right<A, B, C> get_right_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "input cooperative tensors need execution_simdgroup");
        static_assert(k > 0 && k % 16 == 0, "input cooperative tensors need a static k, a multiple of 16");
        return {};
    }
    template <class A, class B, class C>
    Destination<A, B, C> get_destination_cooperative_tensor() const {
        return {};
    }

    // The sum runs along k in ascending order, in float, and is rounded once to the destination's type.
    template <class L, class R, class D>
    void run(const L& left, const R& right, D& destination, METALSIM_SITE) const {
        using namespace metal::detail;
        using A = tensor_element_t<L>;
        using B = tensor_element_t<R>;
        static_assert(is_tensor_element_v<A> && is_tensor_element_v<B>,
                      "only half, bfloat and float are simulated");
        static_assert(std::is_same_v<A, B> || std::is_same_v<A, float>,
                      "operands of these types don't go together");
        static_assert(is_cooperative_v<D>, "only cooperative destinations are simulated");
        static_assert(std::is_same_v<typename D::left_type, A> && std::is_same_v<typename D::right_type, B>,
                      "the destination was made for operands of other types");
        static_assert(std::is_same_v<typename D::layout, TensorLayout<m, n, simdgroups>>,
                      "the destination was made by another operation");
        check_operand<L, transpose_left ? m : k, transpose_left ? k : m, A, B>();
        check_operand<R, transpose_right ? k : n, transpose_right ? n : k, A, B>();
        if constexpr (simdgroups > 1) {
            if (metalsim::current_launch->threads_per_threadgroup.count() != 32u * simdgroups)
                metalsim::report_from_kernel(
                    "tensor-scope", "the threadgroup has not the simdgroups of the operation's scope",
                    nullptr);
            // Uniform arrival; this orders no memory.
            metalsim::threadgroup_barrier_wait(0, METALSIM_HERE(5));
        }
        Operands<L, R, D> own{&left, &right, &destination};
        Collective<Operands<L, R, D>, Multiply, false>::run(own, 0, METALSIM_HERE(6));
    }

  private:
    template <class L, class R, class D>
    struct Operands {
        const L* left;
        const R* right;
        D* destination;
    };

    template <class T, int WIDTH, int HEIGHT, class A, class B>
    static constexpr void check_operand() {
        if constexpr (metal::detail::is_cooperative_v<T>) {
            static_assert(simdgroups == 1, "input cooperative tensors need execution_simdgroup");
            static_assert(
                std::is_same_v<typename T::left_type, A> && std::is_same_v<typename T::right_type, B>,
                "the input was made for operands of other types");
            static_assert(std::is_same_v<typename T::layout, metal::detail::TensorLayout<HEIGHT, WIDTH, 1>>,
                          "the input was made by another operation");
        } else {
            using E = typename T::extents_type;
            static_assert(E::first < 0 || WIDTH == 0 || E::first == WIDTH,
                          "static extent is not the descriptor's");
            static_assert(E::second < 0 || HEIGHT == 0 || E::second == HEIGHT,
                          "static extent is not the descriptor's");
        }
    }

    // Element (x, y) of an operand in memory or in the lanes' registers; beyond the extents 0.
    template <class T>
    static void gather(metal::detail::Lanes<const T*>& lanes, int width, int height, float* out) {
        if constexpr (metal::detail::is_cooperative_v<T>) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < T::layout::capacity; i++) {
                    auto at = T::layout::position(0, lane, i);
                    out[at.row * width + at.column] = round(lanes.in[lane]->elements[i]);
                }
        } else {
            const T& view = *lanes.in[0];
            for (int lane = 1; lane < 32; lane++)
                if (lanes.in[lane]->data != view.data)
                    metalsim::report_from_kernel("tensor-divergence", "lanes bring different tensors",
                                                 nullptr);
            for (int y = 0; y < height; y++)
                for (int x = 0; x < width; x++)
                    out[y * width + x] =
                        x < view.shape.extent(0) && y < view.shape.extent(1) ? round(*view.at(x, y)) : 0.0f;
        }
    }
    // Relaxed precision keeps ten bits of a float's mantissa.
    template <class T>
    static float round(T value) {
        float wide = float(value);
        if (!relaxed || !std::is_same_v<T, float>) return wide;
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        bits = (bits + 0xFFFu + (bits >> 13 & 1u)) & ~0x1FFFu;
        memcpy(&wide, &bits, 4);
        return wide;
    }

    template <class T>
    static int inner(const T& operand, bool first) {
        if constexpr (metal::detail::is_cooperative_v<T>)
            return k;
        else
            return int(operand.shape.extent(first ? 0 : 1));
    }

    // The operands' memory was accessed by gather(); nothing here is for the checker.
    template <class D>
    __attribute__((noinline, no_sanitize("thread"))) static void multiply(const float* a, const float* b,
                                                                          int depth, int simdgroup,
                                                                          D** destinations) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < D::layout::capacity; i++) {
                if (!D::layout::valid(simdgroup, lane, i)) continue;
                auto at = D::layout::position(simdgroup, lane, i);
                auto& target = destinations[lane]->elements[i];
                float sum = accumulate ? float(target) : 0.0f;
                for (int j = 0; j < depth; j++)
                    sum += a[transpose_left ? j * m + at.row : at.row * depth + j] *
                           b[transpose_right ? at.column * depth + j : j * n + at.column];
                target = typename D::element_type(sum);
            }
    }

    struct Multiply {
        template <class L, class R, class D>
        void operator()(metal::detail::Lanes<Operands<L, R, D>>& lanes) {
            if (lanes.active != ~0u)
                return metalsim::report_from_kernel("simd-partial-matrix",
                                                    "tensor operation with inactive lanes", nullptr);
            metal::detail::Lanes<const L*> left;
            metal::detail::Lanes<const R*> right;
            for (int lane = 0; lane < 32; lane++) {
                left.in[lane] = lanes.in[lane].left;
                right.in[lane] = lanes.in[lane].right;
                lanes.out[lane] = lanes.in[lane];
            }
            int left_inner = inner(*left.in[0], !transpose_left),
                right_inner = inner(*right.in[0], transpose_right);
            int depth = k ? k : left_inner;
            if (left_inner < depth || right_inner < depth)
                metalsim::report_from_kernel("tensor-extent", "k reaches beyond the extent of an operand",
                                             nullptr);
            static float a[1 << 16], b[1 << 16];  // one dispatch runs at a time
            if (depth * (m > n ? m : n) > 1 << 16)
                return metalsim::report_from_kernel("tensor-extent", "too large for the simulator", nullptr);
            gather<L>(left, transpose_left ? m : depth, transpose_left ? depth : m, a);
            gather<R>(right, transpose_right ? depth : n, transpose_right ? n : depth, b);
            int simdgroup = simdgroups == 1 ? 0 : metalsim::current_thread->simdgroup_index;
            D* destinations[32];
            for (int lane = 0; lane < 32; lane++) destinations[lane] = lanes.in[lane].destination;
            multiply(a, b, depth, simdgroup, destinations);
        }
    };
};
}  // namespace msl::mpp::tensor_ops
