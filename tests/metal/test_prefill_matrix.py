"""Matrix products with many rows: every tile on both sides of its edges, in both types of activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import (
    ACTIVATIONS,
    NOTHING,
    Array,
    Weights,
    assert_near,
    on_every_seed,
    quantised,
    rms,
    silu,
    structure,
)
from prefill_reference import PATH_TILES, PATHS, expanded, project, rows_shape, stacked, swiglu

SHAPES = [(33, 32), (64, 96), (70, 160)]  # outputs, columns


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("name", "tile"), PATH_TILES)
def test_projection_on_both_sides_of_a_tile(
    sim: Any, kernels: Any, rng: Any, name: str, tile: int, bits: int, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    for rows, (outputs, cols) in zip((tile - 1, tile, tile + 1), SHAPES, strict=True):
        w = quantised(rng, outputs, cols, bits, 32)
        x = rng.normal(0, 1, (rows, cols)).astype(dtype)
        before = np.full((rows, outputs + 3), 7, dtype)
        found = project(
            sim,
            PATHS[name],
            PATHS[name].library(kernels, activation),
            "project_rows",
            tile,
            w,
            x,
            before,
            outputs,
        )
        matrix, wide = expanded(w, dtype), x.astype(np.float64)
        assert_near(found[:, :outputs], wide @ matrix.T, np.abs(wide) @ np.abs(matrix.T), stored)
        assert (found[:, outputs:] == 7).all()


FORMATS = [("simdgroup", kind) for kind in ("b2", "b3", "b5", "b6", "f16", "f32", "mxfp4", "mxfp8", "nvfp4")]
FORMATS += [(name, kind) for name in ("tensor fragments", "tensor tiles") for kind in ("b6", "nvfp4")]


@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_every_format_of_a_checkpoint_expands(sim: Any, kernels: Any, rng: Any, name: str, kind: str) -> None:
    """Tiles of fp32 hold every format exactly, so this compares with the checkpoint's own numbers."""
    w = quantised(rng, 34, 96, kind, 32)
    x = rng.normal(0, 1, (9, 96)).astype(np.float32)
    scale = "uchar" if w.scales.dtype == np.uint8 else "bfloat"
    library = PATHS[name].library(kernels, "float", f"LILY_FORMAT={kind}", f"LILY_SCALE={scale}")
    found = project(sim, PATHS[name], library, "project_rows", 16, w, x, np.zeros((9, 34), np.float32), 34)
    assert_near(found, x @ w.dense.T, np.abs(x) @ np.abs(w.dense.T), 2.0**-22)


@pytest.mark.parametrize(("name", "tile"), PATH_TILES)
def test_projection_adds_to_the_residual_on_every_schedule(
    sim: Any, kernels: Any, rng: Any, name: str, tile: int
) -> None:
    dtype = ACTIVATIONS["bfloat"][0]
    w = quantised(rng, 45, 96, 4, 32)
    x = rng.normal(0, 1, (tile + 5, 96)).astype(dtype)
    before = rng.normal(0, 1, (tile + 5, 45)).astype(np.float32)
    library = PATHS[name].library(kernels)
    found = on_every_seed(
        sim, lambda: project(sim, PATHS[name], library, "project_add_rows", tile, w, x, before, 45)
    )
    matrix, wide = expanded(w, dtype), x.astype(np.float64)
    assert_near(found, before + wide @ matrix.T, np.abs(before) + np.abs(wide) @ np.abs(matrix.T), 2.0**-22)


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize(("name", "tile"), PATH_TILES)
def test_gate_and_up_meet_in_one_launch(
    sim: Any, kernels: Any, rng: Any, name: str, tile: int, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    width, cols, rows = 41, 96, tile + 1
    w = quantised(rng, 2 * width, cols, 4, 32)
    x = rng.normal(0, 1, (rows, cols)).astype(dtype)
    before = np.zeros((rows, width), dtype)
    found = project(
        sim, PATHS[name], PATHS[name].library(kernels, activation), "gate_up_rows", tile, w, x, before, width
    )
    matrix, wide = expanded(w, dtype), x.astype(np.float64)
    gate, up = np.split(wide @ matrix.T, 2, axis=1)
    sizes = np.split(np.abs(wide) @ np.abs(matrix.T), 2, axis=1)
    magnitude = (np.abs(gate) + sizes[0]) * (np.abs(up) + sizes[1])
    assert_near(found, silu(gate) * up, magnitude, stored)


@pytest.mark.parametrize(("name", "tile"), PATH_TILES)
def test_gate_and_up_of_different_formats_meet_after_their_products(
    sim: Any, kernels: Any, rng: Any, name: str, tile: int
) -> None:
    """Rows and columns beyond a tile; with fp32 activations the bytes are those of gate_up_rows."""
    width, cols, rows = 41, 96, tile + 1
    for activation, formats in (("bfloat", (4, 8)), ("float", (4, 4))):
        dtype, stored = ACTIVATIONS[activation]
        library = PATHS[name].library(kernels, activation)
        weights = [quantised(rng, width, cols, bits, 32) for bits in formats]
        x = rng.normal(0, 1, (rows, cols)).astype(dtype)
        before = np.zeros((rows, width), dtype)
        gate, up = (
            project(sim, PATHS[name], library, "project_rows", tile, w, x, before, width) for w in weights
        )
        found = swiglu(sim, kernels, activation, gate, up, before[:, None], width)[:, 0]
        wanted = silu(gate) * up.astype(np.float64)
        assert_near(found, wanted, np.abs(wanted), stored)
        if formats[0] == formats[1]:
            both = stacked(*weights)
            one = project(sim, PATHS[name], library, "gate_up_rows", tile, both, x, before, width)
            assert found.tobytes() == one.tobytes()


@pytest.mark.parametrize("name", PATHS)
def test_the_bits_of_a_row_depend_on_neither_tile_nor_company(
    sim: Any, kernels: Any, rng: Any, name: str
) -> None:
    dtype = ACTIVATIONS["bfloat"][0]
    w = quantised(rng, 40, 192, 4)
    x = rng.normal(0, 1, (67, 192)).astype(dtype)
    library = PATHS[name].library(kernels)
    for kernel, outputs in (("project_rows", 40), ("gate_up_rows", 20)):
        results = [
            project(
                sim,
                PATHS[name],
                library,
                kernel,
                tile,
                w,
                rows,
                np.zeros((len(rows), outputs), dtype),
                outputs,
            )
            for tile in PATHS[name].tiles
            for rows in (x, x[:9], x[:1])
        ]
        for found in results:
            assert found.tobytes() == results[0][: len(found)].tobytes()


def test_whole_tiles_give_the_same_bytes(sim: Any, kernels: Any, rng: Any) -> None:
    dtype = ACTIVATIONS["bfloat"][0]
    w = quantised(rng, 40, 96, 4, 32)
    x = rng.normal(0, 1, (70, 96)).astype(dtype)
    path, before = PATHS["simdgroup"], np.zeros((70, 40), dtype)
    found = [
        project(sim, path, kernels(file), "project_rows", 64, w, x, before, 40).tobytes()
        for file in ("matrix_simdgroup", "ablation/whole_tiles")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["b4", "b8"])
def test_a_matrix_expanded_beforehand_gives_the_same_bytes(
    sim: Any, kernels: Any, rng: Any, kind: str
) -> None:
    dtype = ACTIVATIONS["bfloat"][0]
    w = quantised(rng, 70, 288, kind, 32)
    x = rng.normal(0, 1, (9, 288)).astype(dtype)
    path, before = PATHS["simdgroup"], np.zeros((9, 70), dtype)
    out = sim.buffer(np.zeros((70, 288), dtype), "expanded")
    arguments = w.arguments(sim) | {3: out, 4: structure(70, 288, w.group_shift)}
    with sim.encoder() as encoder:
        library = kernels("ablation/expand_weights")
        groups = -(-70 * 288 // 8192)
        encoder.dispatch(library, f"expand_weights_{kind}", arguments, groups=groups, group=256)
    assert sim.diagnostics() == []
    matrix = out.array(dtype, (70, 288)).copy()
    assert (matrix.astype(np.float64) == expanded(w, dtype)).all()
    plain = Weights("b16", 32, matrix, NOTHING, NOTHING, matrix.astype(np.float64))
    found = [
        project(sim, path, path.library(kernels), "project_rows", 16, weights, x, before, 70).tobytes()
        for weights in (w, plain)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("bits", "rows", "outputs", "cols"), [(8, 17, 65, 160), (4, 16, 9, 96), (16, 3, 130, 32)]
)
def test_router_has_the_precision_of_one_row(
    sim: Any, kernels: Any, rng: Any, bits: int, rows: int, outputs: int, cols: int
) -> None:
    """norm_rows, then route_rows on the residual itself: fp32 throughout."""
    w = quantised(rng, outputs, cols, bits, 32)
    x = rng.normal(0, 2, (rows, cols)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    dtype, stored = ACTIVATIONS["bfloat"]
    normed, logits = sim.buffer(2 * rows * cols, "normed"), sim.buffer(4 * rows * outputs, "logits")
    inverses, inputs, gains = sim.buffer(4 * rows, "inverses"), sim.buffer(x, "x"), sim.buffer(gain, "gain")
    shape = rows_shape(rows, w, outputs, outputs)
    library = kernels("matrix_simdgroup")

    def compute() -> Array:
        with sim.encoder(concurrent=True) as encoder:
            first = {0: inputs, 1: gains, 2: normed, 3: inverses, 4: shape}
            encoder.dispatch(library, "norm_rows", first, groups=rows, group=256)
            encoder.barrier()
            second = w.arguments(sim) | {3: inputs, 4: gains, 5: inverses, 6: logits, 7: shape}
            groups = (-(-outputs // 64), -(-rows // 16))
            encoder.dispatch(library, f"route_rows_{w.format}", second, groups=groups, group=128)
        assert sim.diagnostics() == []
        return np.asarray(logits.array(np.float32, (rows, outputs)).copy())

    found = on_every_seed(sim, compute)
    wanted = rms(x) * gain
    assert_near(found, wanted @ w.dense.T, np.abs(wanted) @ np.abs(w.dense.T), 2.0**-22)
    assert_near(normed.array(dtype, (rows, cols)), wanted, np.abs(wanted), stored)


@pytest.mark.parametrize("name", PATHS)
def test_weights_are_read_compressed_and_never_written_expanded(
    sim: Any, kernels: Any, rng: Any, name: str
) -> None:
    """64 rows take the matrix once per tile of rows; what is written is the result."""
    dtype = ACTIVATIONS["bfloat"][0]
    w = quantised(rng, 128, 512, 4)
    x = rng.normal(0, 1, (64, 512)).astype(dtype)
    before = np.zeros((64, 128), dtype)
    sim.log_dispatches()
    project(sim, PATHS[name], PATHS[name].library(kernels), "project_rows", 64, w, x, before, 128)
    (work,) = sim.dispatches()
    assert work.bytes_written == before.nbytes == work.bytes_stored
    assert work.bytes_read <= w.nbytes + x.nbytes + 64
    readers = {"simdgroup": 2, "tensor fragments": 4, "tensor tiles": 1}[name]  # tiles, or simdgroups
    assert work.bytes_loaded <= 1.12 * w.nbytes + readers * x.nbytes  # a scale per 32 columns, not 64


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("name", PATHS)
def test_threadgroup_memory_is_within_the_limit(kernels: Any, name: str, activation: str) -> None:
    library = PATHS[name].library(kernels, activation)
    sizes = {kernel: library.threadgroup_memory(kernel) for kernel in library.kernels}
    assert max(sizes.values()) <= 28672, sizes
