"""Projections of one to eight rows: exact weights, odd shapes, one arithmetic for every number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import (
    ACTIVATIONS,
    BF16,
    EPS,
    Array,
    Weights,
    assert_near,
    on_every_seed,
    quantised,
    rms,
    run,
    silu,
    structure,
)

ROWS = (1, 2, 4, 8)


def capacity(rows: int) -> int:
    """The kernel's M for a number of rows."""
    return next(m for m in ROWS if m >= rows)


def block(wanted: int, m: int) -> int:
    """Weight rows per half of a simdgroup."""
    return min(wanted, 16 // m)


def shape(weights: Weights, x: Array, outputs: int, stride: int) -> bytes:
    return structure(len(x), x.shape[1], outputs, stride, weights.group_shift, EPS)


def launch(
    sim: Any, library: Any, name: str, weights: Weights, arguments: dict[int, Any], **geometry: int
) -> None:
    rows, per_half, simdgroups = geometry["rows"], geometry["per_half"], geometry["simdgroups"]
    halves = geometry.get("halves", 2)  # weight rows that a simdgroup reads at a time
    run(
        sim,
        {
            "library": library,
            "kernel": f"{name}_{weights.format}_m{capacity(rows)}",
            "arguments": weights.arguments(sim) | arguments,
            "groups": -(-geometry["outputs"] // (halves * per_half * simdgroups)),
            "group": 32 * simdgroups,
        },
    )


def norm_project(sim: Any, library: Any, w: Weights, x: Array, gain: Array, dtype: Any) -> Array:
    outputs = len(w.dense)
    out = sim.buffer(np.full((len(x), outputs + 3), 7, dtype), "out")
    arguments = {3: sim.buffer(x, "input"), 4: sim.buffer(gain, "gain"), 5: out}
    arguments[6] = shape(w, x, outputs, outputs + 3)
    per_half = block(4, capacity(len(x)))
    launch(
        sim, library, "norm_project", w, arguments,
        rows=len(x), per_half=per_half, simdgroups=8, outputs=outputs,
    )  # fmt: skip
    found = out.array(dtype, (len(x), outputs + 3)).copy()
    assert (found[:, outputs:] == 7).all(), "wrote beyond its columns"
    return found[:, :outputs]


def inputs(rng: np.random.Generator, rows: int, cols: int) -> tuple[Array, Array]:
    x = rng.normal(0, 1, (rows, cols)).astype(np.float32) * np.linspace(0.1, 5, rows)[:, None]
    return x.astype(np.float32), rng.uniform(0.5, 1.5, cols).astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "group", "rows", "outputs", "cols"),
    [
        (4, 32, 1, 37, 96),  # three chunks: most lanes idle
        (4, 64, 1, 130, 2112),  # a second tile of two chunks
        (4, 128, 3, 65, 640),
        (8, 64, 2, 33, 1088),
        (8, 32, 5, 19, 544),
        (16, 32, 8, 21, 544),
        (4, 64, 8, 9, 128),
    ],
)
@pytest.mark.parametrize("activation", ["bfloat", "float"])
def test_norm_project_is_the_projection_of_the_normed_row(
    sim: Any,
    kernels: Any,
    rng: Any,
    activation: str,
    bits: int,
    group: int,
    rows: int,
    outputs: int,
    cols: int,
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    weights = quantised(rng, outputs, cols, bits, group)
    x, gain = inputs(rng, rows, cols)
    library = kernels("project", activation)
    found = on_every_seed(sim, lambda: norm_project(sim, library, weights, x, gain, dtype))
    normed = rms(x) * gain
    assert_near(found, normed @ weights.dense.T, np.abs(normed) @ np.abs(weights.dense.T), stored)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(
    sim: Any, kernels: Any, rng: Any, bits: int
) -> None:
    library = kernels("project", "float")
    weights = quantised(rng, 23, 1152, bits)
    x, gain = inputs(rng, 8, 1152)
    together = norm_project(sim, library, weights, x, gain, np.float32)
    for count in (1, 2, 3, 4, 7):
        few = norm_project(sim, library, weights, x[-count:], gain, np.float32)
        assert few.tobytes() == together[-count:].tobytes()


@pytest.mark.parametrize(
    ("bits", "rows", "width", "cols"), [(4, 1, 43, 192), (8, 3, 20, 576), (16, 8, 9, 96)]
)
def test_gate_and_up_share_a_launch(
    sim: Any, kernels: Any, rng: Any, bits: int, rows: int, width: int, cols: int
) -> None:
    weights = quantised(rng, 2 * width, cols, bits, 32)
    x, gain = inputs(rng, rows, cols)

    def compute() -> Array:
        out = sim.buffer(np.zeros((rows, width), np.float32), "out")
        arguments = {3: sim.buffer(x, "input"), 4: sim.buffer(gain, "gain"), 5: out}
        arguments[6] = shape(weights, x, width, width)
        per_half = block(4, capacity(rows)) // 2
        launch(
            sim, kernels("project", "float"), "norm_gate_up", weights, arguments,
            rows=rows, per_half=per_half, simdgroups=8, outputs=width,
        )  # fmt: skip
        return out.array(np.float32, (rows, width)).copy()

    normed = rms(x) * gain
    gate, up = np.split(normed @ weights.dense.T, 2, axis=1)
    size = np.abs(normed) @ np.abs(weights.dense.T)
    magnitude = (np.abs(gate) + size[:, :width]) * (np.abs(up) + size[:, width:])
    assert_near(on_every_seed(sim, compute), silu(gate) * up, magnitude, 2.0**-22)


@pytest.mark.parametrize("simdgroups", [2, 4])
@pytest.mark.parametrize(
    ("bits", "rows", "outputs", "cols"), [(4, 1, 35, 160), (4, 4, 17, 1056), (8, 2, 40, 96), (16, 6, 18, 64)]
)
def test_project_add_adds_to_the_residual(
    sim: Any, kernels: Any, rng: Any, bits: int, rows: int, outputs: int, cols: int, simdgroups: int
) -> None:
    weights = quantised(rng, outputs, cols, bits, 32)
    x = rng.normal(0, 1, (rows, cols)).astype(BF16)
    before = rng.normal(0, 1, (rows, outputs)).astype(np.float32)

    def compute() -> Array:
        residual = sim.buffer(before, "residual")
        arguments = {3: sim.buffer(x, "input"), 4: residual, 5: shape(weights, x, outputs, outputs)}
        launch(
            sim, kernels("project"), "project_add", weights, arguments,
            rows=rows, per_half=block(2, capacity(rows)), simdgroups=simdgroups, outputs=outputs,
        )  # fmt: skip
        return residual.array(np.float32, (rows, outputs)).copy()

    wide = x.astype(np.float64)
    wanted = before + wide @ weights.dense.T
    magnitude = np.abs(before) + np.abs(wide) @ np.abs(weights.dense.T)
    assert_near(on_every_seed(sim, compute), wanted, magnitude, 2.0**-22)


@pytest.mark.parametrize(("rows", "heads", "head", "slices"), [(1, 6, 32, 2), (3, 3, 128, 8), (8, 2, 64, 4)])
def test_project_add_heads_divides_each_head_by_its_root_mean_square(
    sim: Any, kernels: Any, rng: Any, rows: int, heads: int, head: int, slices: int
) -> None:
    outputs, cols = 21, heads * head
    weights = quantised(rng, outputs, cols, 4, 32)
    x = rng.normal(0, 1, (rows, cols)).astype(BF16)
    squares = rng.uniform(0.1, 9, (rows, heads, slices)).astype(np.float32)

    def compute() -> Array:
        residual = sim.buffer(np.zeros((rows, outputs), np.float32), "residual")
        arguments = {3: sim.buffer(x, "input"), 4: residual, 5: shape(weights, x, outputs, outputs)}
        arguments |= {6: sim.buffer(squares, "squares")}
        arguments |= {7: structure(heads, head.bit_length() - 1, slices, EPS)}
        launch(
            sim, kernels("project"), "project_add_heads", weights, arguments,
            rows=rows, per_half=block(2, capacity(rows)), simdgroups=4, outputs=outputs,
        )  # fmt: skip
        return residual.array(np.float32, (rows, outputs)).copy()

    inverse = 1 / np.sqrt(squares.astype(np.float64).sum(-1) / head + EPS)
    scaled = x.astype(np.float64) * np.repeat(inverse, head, axis=1)
    magnitude = np.abs(scaled) @ np.abs(weights.dense.T)
    assert_near(on_every_seed(sim, compute), scaled @ weights.dense.T, magnitude, 2.0**-22)


def test_weights_are_read_once_and_loads_stay_near_that(sim: Any, kernels: Any, rng: Any) -> None:
    """At the width of the 35B model: distinct bytes are the weights and the row; loads below 1.6 times."""
    weights = quantised(rng, 256, 2048, 4)
    x, gain = inputs(rng, 1, 2048)
    sim.log_dispatches()
    norm_project(sim, kernels("project"), weights, x, gain, BF16)
    (work,) = sim.dispatches()
    assert weights.nbytes <= work.bytes_read <= weights.nbytes + x.nbytes + gain.nbytes
    assert work.bytes_written == 2 * 256
    assert work.bytes_loaded < 1.6 * weights.nbytes
