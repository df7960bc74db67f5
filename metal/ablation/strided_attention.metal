// Attention whose lanes read the cache without coalescing, for comparison.
//
// The kernels of attention.metal, their names, bindings and parameters, the same cache. At any time the lanes
// of a simdgroup read 32 rows of transposed keys, or 32 positions' values, in as many places: each begins its
// walk through the same dimensions and positions elsewhere. Sums run in that order.
// Launch: as in attention.metal. Bound, formulas: see there.
#define LILY_STRIDED_READS
#include "attention.metal"
