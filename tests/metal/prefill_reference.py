"""What the tests of prefill kernels share: expanded weights, launches of matrix kernels, mixtures of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from metal_reference import EPS, Array, Library, Weights, launched, structure


@dataclass(frozen=True)
class MatrixPath:
    """One of the ways to multiply: a kernel file, its build and its geometry."""

    file: str
    defines: tuple[str, ...]
    tiles: tuple[int, ...]

    @property
    def is_tensor(self) -> bool:
        return self.file == "matrix_tensor"

    def library(self, kernels: Any, activation: str = "bfloat", *define: str) -> Library:
        """The file built for this path."""
        built: Library = kernels(self.file, activation, *self.defines, *define)
        return built

    def threads(self, tile: int) -> int:
        """Threads of a threadgroup."""
        return 64 if self.is_tensor and tile == 16 else 128

    def columns(self, kernel: str, tile: int) -> int:
        """Output columns of a threadgroup."""
        if self.is_tensor:
            columns = 64 if tile == 16 else 128
        else:
            columns = 32 if tile < 32 and kernel.startswith("project") else 64
        return columns // 2 if kernel in ("gate_up_rows", "experts_up_rows") else columns


SIMDGROUP = MatrixPath("matrix_simdgroup", (), (8, 16, 32, 64))
FRAGMENTS = MatrixPath("matrix_tensor", (), (16, 32, 64))
TENSOR_TILES = MatrixPath("matrix_tensor", ("LILY_TENSOR_TILES=1",), (16, 32, 64))
PATHS = {"simdgroup": SIMDGROUP, "tensor fragments": FRAGMENTS, "tensor tiles": TENSOR_TILES}
PATH_TILES = [(name, tile) for name, path in PATHS.items() for tile in path.tiles]


def expanded(weights: Weights, dtype: Any) -> npt.NDArray[np.float64]:
    """The matrix as a tile holds it: each weight rounded once to the type of the tile."""
    return np.asarray(weights.dense.astype(np.float32).astype(dtype).astype(np.float64))


def stacked(gate: Weights, up: Weights, experts: int = 1) -> Weights:
    """One stack of two matrices of one format, gate above up for each expert."""

    def both(first: Array, second: Array) -> Array:
        parts = (part.reshape(experts, -1, part.shape[-1]) for part in (first, second))
        return np.concatenate(list(parts), axis=1).reshape(-1, first.shape[-1])

    pairs = ((getattr(gate, name), getattr(up, name)) for name in ("codes", "scales", "biases", "dense"))
    return Weights(gate.format, gate.group, *(both(*pair) for pair in pairs))


def rows_shape(rows: int, w: Weights, outputs: int, stride: int) -> bytes:
    """RowsShape of matrix_simdgroup.metal."""
    return structure(rows, w.dense.shape[1], outputs, stride, w.group_shift, EPS)


def swiglu(
    sim: Any, kernels: Any, activation: str, gate: Array, up: Array, before: Array, width: int
) -> Array:
    """`before` [rows, slots, stride] after swiglu of the first `width` columns of gate and up."""
    rows, slots, stride = before.shape
    out = sim.buffer(before, "out")
    arguments = {0: sim.buffer(gate, "gate"), 1: sim.buffer(up, "up"), 2: out}
    with sim.encoder() as encoder:
        launched(
            encoder,
            library=kernels("ablation/unfused_project", activation),
            kernel="swiglu",
            arguments=arguments | {3: structure(width, stride, slots * stride)},
            groups=(-(-width // 256), slots, rows),
            group=256,
        )
    assert sim.diagnostics() == []
    return np.asarray(out.array(before.dtype, before.shape).copy())


def project(
    sim: Any,
    path: MatrixPath,
    library: Any,
    kernel: str,
    tile: int,
    w: Weights,
    x: Array,
    before: Array,
    outputs: int,
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
            groups=(-(-outputs // path.columns(kernel, tile)), -(-rows // tile)),
            group=path.threads(tile),
        )
    assert sim.diagnostics() == []
    return np.asarray(out.array(before.dtype, before.shape).copy())
