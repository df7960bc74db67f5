// Check build: Metal 4 tensors and matmul2d; element types, scopes and static extents are checked as the
// real headers do.
#pragma once
#include "functions.hpp"
#if __METAL_VERSION__ >= 400

namespace metal {
constant constexpr int dynamic_extent = -1;
template <typename I, int E0, int E1>
struct extents {
    extents();
    extents(I first, I second);
    I extent(int i) const;
    static constant constexpr int first = E0;
    static constant constexpr int second = E1;
};
namespace detail {
template <typename I, int R>
struct dynamic_extents;
template <typename I>
struct dynamic_extents<I, 2> {
    using type = extents<I, -1, -1>;
};
template <typename T>
constant constexpr bool is_const_element_v = false;
template <typename T>
constant constexpr bool is_const_element_v<const T> = true;
}  // namespace detail
template <typename I, int R>
using dextents = typename detail::dynamic_extents<I, R>::type;
struct tensor_inline {};

template <typename T, typename E, typename Kind>
struct tensor {
    static_assert(!is_same_v<T, remove_addrspace_t<T>>, "tensor elements need an address space: device or threadgroup");
    static_assert(!detail::is_const_element_v<remove_addrspace_t<T>>, "tensors have no const elements: cast the pointer");
    using element_type = remove_addrspace_t<T>;
    using extents_type = E;
    tensor(T* p, E e);
    tensor(T* p, E e, array<int, 2> strides);
    E extents() const;
    tensor<T, dextents<int, 2>, Kind> slice(int x, int y) const;
    template <int W, int H>
    tensor<T, metal::extents<int, W, H>, Kind> slice(int x, int y) const;
    T* pointer;
};

struct execution_thread {
    static constant constexpr int simdgroups = 0;
};
struct execution_simdgroup {
    static constant constexpr int simdgroups = 1;
};
template <int N>
struct execution_simdgroups {
    static constant constexpr int simdgroups = N;
};

template <typename T, int R, int C, int S, typename A, typename B>
struct cooperative_tensor {
    using element_type = T;
    using left_type = A;
    using right_type = B;
    static constexpr ushort get_capacity() { return 8; }
    thread T& operator[](ushort i) thread;
    T operator[](ushort i) const thread;
    bool is_valid_element(ushort i) const;
    array<int, 2> get_multidimensional_index(ushort i) const;
    template <typename Tensor>
    void store(const thread Tensor& target) const {
        static_assert(is_same_v<typename Tensor::element_type, T>, "store converts no elements");
    }
    T first;
};
namespace detail {
template <typename T>
constant constexpr bool is_cooperative_v = false;
template <typename T, int R, int C, int S, typename A, typename B>
constant constexpr bool is_cooperative_v<cooperative_tensor<T, R, C, S, A, B>> = true;
template <typename T>
struct tensor_element {
    using type = T;
};
template <typename T, typename E, typename K>
struct tensor_element<tensor<T, E, K>> {
    using type = remove_addrspace_t<T>;
};
template <typename T, int R, int C, int S, typename A, typename B>
struct tensor_element<cooperative_tensor<T, R, C, S, A, B>> {
    using type = T;
};
template <typename T>
using tensor_element_t = typename tensor_element<remove_cv_t<remove_addrspace_t<T>>>::type;
template <typename T>
constant constexpr bool is_tensor_element_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;

template <typename T, int WIDTH, int HEIGHT, int SIMDGROUPS, typename A, typename B>
struct operand {
    using E = typename T::extents_type;
    static_assert(E::first < 0 || WIDTH == 0 || E::first == WIDTH, "static extent is not the descriptor's");
    static_assert(E::second < 0 || HEIGHT == 0 || E::second == HEIGHT, "static extent is not the descriptor's");
    static constant constexpr bool fits = true;
};
template <typename T, int R, int C, int S, typename X, typename Y, int WIDTH, int HEIGHT, int SIMDGROUPS, typename A, typename B>
struct operand<cooperative_tensor<T, R, C, S, X, Y>, WIDTH, HEIGHT, SIMDGROUPS, A, B> {
    static_assert(SIMDGROUPS == 1, "input cooperative tensors need execution_simdgroup");
    static_assert(is_same_v<X, A> && is_same_v<Y, B>, "the input was made for operands of other types");
    static_assert(R == HEIGHT && C == WIDTH, "the input was made by another operation");
    static constant constexpr bool fits = true;
};
}  // namespace detail
}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    ulong bits;
    constexpr matmul2d_descriptor(int m, int n, int k = metal::dynamic_extent, bool transpose_left = false,
                                  bool transpose_right = false, bool relaxed_precision = false,
                                  mode matmul_mode = mode::multiply)
        : bits((ulong)m | (ulong)n << 16 | (ulong)(k < 0 ? 0 : k) << 32 | (ulong)transpose_left << 48 |
               (ulong)transpose_right << 49 | (ulong)relaxed_precision << 50 |
               (ulong)(matmul_mode == mode::multiply_accumulate) << 51) {}
    constexpr operator ulong() const { return bits; }
};

template <ulong DESCRIPTOR, typename Scope>
struct matmul2d {
    static constant constexpr int m = DESCRIPTOR & 0xFFFF;
    static constant constexpr int n = DESCRIPTOR >> 16 & 0xFFFF;
    static constant constexpr int k = DESCRIPTOR >> 32 & 0xFFFF;
    static constant constexpr bool tl = DESCRIPTOR >> 48 & 1;
    static constant constexpr bool tr = DESCRIPTOR >> 49 & 1;
    static constant constexpr int simdgroups = Scope::simdgroups;
    static_assert(m > 0 && n > 0 && m % 8 == 0 && n % 8 == 0 && (m % 16 == 0 || n % 16 == 0),
                  "matmul2d: m and n are multiples of 8, one of them of 16");
    static_assert(simdgroups > 0, "matmul2d in one thread is not known here");
    template <typename A, typename B, typename C>
    metal::cooperative_tensor<A, tl ? k : m, tl ? m : k, 1, A, B> get_left_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "input cooperative tensors need execution_simdgroup");
        static_assert(k > 0 && k % 16 == 0, "input cooperative tensors need a static k, a multiple of 16");
        metal::cooperative_tensor<A, tl ? k : m, tl ? m : k, 1, A, B> t;
        return t;
    }
    template <typename A, typename B, typename C>
    metal::cooperative_tensor<B, tr ? n : k, tr ? k : n, 1, A, B> get_right_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "input cooperative tensors need execution_simdgroup");
        static_assert(k > 0 && k % 16 == 0, "input cooperative tensors need a static k, a multiple of 16");
        metal::cooperative_tensor<B, tr ? n : k, tr ? k : n, 1, A, B> t;
        return t;
    }
    template <typename A, typename B, typename C>
    metal::cooperative_tensor<C, m, n, simdgroups, metal::detail::tensor_element_t<A>, metal::detail::tensor_element_t<B>>
    get_destination_cooperative_tensor() const;
    template <typename L, typename R, typename D>
    void run(const thread L& left, const thread R& right, thread D& destination) const {
        using A = metal::detail::tensor_element_t<L>;
        using B = metal::detail::tensor_element_t<R>;
        static_assert(metal::detail::is_tensor_element_v<A> && metal::detail::is_tensor_element_v<B>,
                      "only half, bfloat and float are known here");
        static_assert(metal::is_same_v<A, B> || metal::is_same_v<A, float>, "operands of these types don't go together");
        static_assert(metal::detail::is_cooperative_v<D>, "only cooperative destinations are known here");
        static_assert(metal::is_same_v<typename D::left_type, A> && metal::is_same_v<typename D::right_type, B>,
                      "the destination was made for operands of other types");
        static_assert(metal::detail::operand<L, tl ? m : k, tl ? k : m, simdgroups, A, B>::fits, "");
        static_assert(metal::detail::operand<R, tr ? k : n, tr ? n : k, simdgroups, A, B>::fits, "");
    }
};
}  // namespace tensor_ops
}  // namespace mpp
#endif
