// simdgroup_matrix 8x8: two adjacent elements of a row per lane, in the layout that thread_elements() shows.
#pragma once
#include "collective.hpp"

namespace msl::metal {
namespace detail {
struct MatrixPosition {
    int row, column;
    explicit MatrixPosition(uint32_t lane) {
        int quad = lane / 4;
        row = (quad & 4) + (lane / 2) % 4;
        column = (quad & 2) * 2 + (lane % 2) * 2;
    }
};
}  // namespace detail

template <class T, int R = 8, int C = 8>
struct simdgroup_matrix {
    static_assert(R == 8 && C == 8, "simdgroup matrices are 8x8");
    vec<T, 2> elements;
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal) {
        detail::MatrixPosition at(metalsim::current_thread->lane);
        elements =
            vec<T, 2>(at.row == at.column ? diagonal : T(0), at.row == at.column + 1 ? diagonal : T(0));
    }
    vec<T, 2>& thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, R, C> m;
    m.elements = vec<T, 2>(value);
    return m;
}

// All lanes must take part, but the load and the store order no memory.
template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* p, ulong elements_per_row = 8,
                    ulong2 origin = ulong2(0), bool transpose = false, METALSIM_SITE) {
    metalsim::simdgroup_barrier_wait(0, METALSIM_HERE(3));
    detail::MatrixPosition at(metalsim::current_thread->lane);
    p += origin.y * elements_per_row + origin.x;
    if (transpose)
        m.elements = vec<T, 2>(p[at.column * elements_per_row + at.row],
                               p[(at.column + 1) * elements_per_row + at.row]);
    else
        m.elements =
            vec<T, 2>(p[at.row * elements_per_row + at.column], p[at.row * elements_per_row + at.column + 1]);
}
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* p, ulong elements_per_row = 8, ulong2 origin = ulong2(0),
                     bool transpose = false, METALSIM_SITE) {
    metalsim::simdgroup_barrier_wait(0, METALSIM_HERE(4));
    detail::MatrixPosition at(metalsim::current_thread->lane);
    p += origin.y * elements_per_row + origin.x;
    if (transpose) {
        p[at.column * elements_per_row + at.row] = m.elements.x;
        p[(at.column + 1) * elements_per_row + at.row] = m.elements.y;
    } else {
        p[at.row * elements_per_row + at.column] = m.elements.x;
        p[at.row * elements_per_row + at.column + 1] = m.elements.y;
    }
}

namespace detail {
template <class A, class B, class D>
struct MultiplyOperands {
    vec<A, 2> a;
    vec<B, 2> b;
    vec<D, 2> c;
};
// D = A B + C in float, summed along k in ascending order, rounded once to D's type.
struct MultiplyAccumulate {
    template <class A, class B, class D>
    void operator()(Lanes<MultiplyOperands<A, B, D>>& l) {
        if (l.active != ~0u)
            metalsim::report_from_kernel("simd-partial-matrix",
                                         "simdgroup matrix operation with inactive lanes", nullptr);
        float a[8][8], b[8][8];
        for (int lane = 0; lane < 32; lane++) {
            MatrixPosition at(lane);
            for (int j = 0; j < 2; j++) {
                a[at.row][at.column + j] = float(l.in[lane].a[j]);
                b[at.row][at.column + j] = float(l.in[lane].b[j]);
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            MatrixPosition at(lane);
            l.out[lane] = l.in[lane];
            for (int j = 0; j < 2; j++) {
                float sum = float(l.in[lane].c[j]);
                for (int k = 0; k < 8; k++) sum += a[at.row][k] * b[k][at.column + j];
                l.out[lane].c[j] = D(sum);
            }
        }
    }
};
}  // namespace detail

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, METALSIM_SITE) {
    using Operands = detail::MultiplyOperands<A, B, D>;
    Operands in{a.elements, b.elements, vec<D, 2>(c.elements.x, c.elements.y)};
    d.elements =
        detail::Collective<Operands, detail::MultiplyAccumulate, false>::run(in, 0, METALSIM_HERE(0)).c;
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                        simdgroup_matrix<B, 8, 8> b, METALSIM_SITE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), file_, line_,
                                  column_);
}
}  // namespace msl::metal
