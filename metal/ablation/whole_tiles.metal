// Products of many rows with whole tiles, for comparison: without leaving out the eights of a tile that have
// no rows.
//
// The kernels of matrix_simdgroup.metal, their names, bindings and bytes.
// Launch: see matrix_simdgroup.metal.
// Bound: multiply-adds of T rows for every block.
#define LILY_WHOLE_TILES
#include "matrix_simdgroup.metal"
