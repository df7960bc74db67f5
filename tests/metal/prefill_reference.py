"""What the tests of prefill kernels share: expanded weights, launches of matrix kernels, mixtures of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from metal_reference import EPS, Array, Weights, launched, structure

TILES = (8, 16, 32, 64)


def expanded(weights: Weights, dtype: Any) -> npt.NDArray[np.float64]:
    """The matrix as a tile holds it: each weight rounded once to the type of the tile."""
    return np.asarray(weights.dense.astype(np.float32).astype(dtype).astype(np.float64))


def rows_shape(rows: int, w: Weights, outputs: int, stride: int) -> bytes:
    """RowsShape of matrix_simdgroup.metal."""
    return structure(rows, w.dense.shape[1], outputs, stride, w.group_shift, EPS)


def tile_columns(kernel: str, tile: int) -> int:
    """Output columns of a threadgroup."""
    return 32 if kernel == "gate_up_rows" or tile < 32 else 64


def project(
    sim: Any, library: Any, kernel: str, tile: int, w: Weights, x: Array, before: Array, outputs: int
) -> Array:
    """`before` [rows, stride] after project_rows, project_add_rows or gate_up_rows of x."""
    rows = len(x)
    out = sim.buffer(before, "out")
    arguments = w.arguments(sim) | {3: sim.buffer(x, "input"), 4: out}
    arguments[5] = rows_shape(rows, w, outputs, before.shape[1])
    with sim.encoder() as encoder:
        launched(
            encoder,
            library=library,
            kernel=f"{kernel}_{w.format}_t{tile}",
            arguments=arguments,
            groups=(-(-outputs // tile_columns(kernel, tile)), -(-rows // tile)),
            group=128,
        )
    assert sim.diagnostics() == []
    return np.asarray(out.array(before.dtype, before.shape).copy())
