// Projections with one simdgroup per output, for comparison: without several rows for each input value that
// is read, without inputs that carry the codes' powers of two, without codes masked in place.
//
// The kernels of project.metal, their names, bindings and parameters; codes are shifted to their place.
// Launch: a simdgroup gives one output (gate and up together are one): 8 for a threadgroup of 256 threads, 4 for
//         one of 128, whatever the rows.
// Bound, formulas: see project.metal.
#define LILY_ONE_ROW
#include "project.metal"
