"""Normed rows, and the projection of an embedding beside a hidden row that begins a draft head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import EPS, Array, Weights, assert_near, on_every_seed, quantised, rms, run, structure
from test_metal_head import head


def combine(
    sim: Any,
    library: Any,
    w: Weights,
    embedding: Array,
    hidden: Array,
    gains: list[Array],
    sources: Array,
    per_group: int = 32,  # weight rows of a threadgroup
) -> Array:
    """Rows of the result; `sources` are the hidden rows."""
    rows, cols = embedding.shape
    outputs, stride = len(w.dense), len(w.dense) + 3
    out = sim.buffer(np.full((rows, stride), 7, np.float32), "out")
    arguments = w.arguments(sim) | {3: sim.buffer(embedding, "embedding"), 4: sim.buffer(gains[0], "gain")}
    arguments |= {5: sim.buffer(hidden, "hidden"), 6: sim.buffer(gains[1], "gain")}
    arguments |= {7: sim.buffer(sources.astype(np.uint32), "sources"), 8: out}
    arguments[9] = structure(rows, cols, outputs, stride, w.group_shift, EPS)
    run(
        sim,
        {
            "library": library,
            "kernel": f"combine_hidden_{w.format}_m{next(m for m in (1, 2, 4, 8) if m >= rows)}",
            "arguments": arguments,
            "groups": -(-outputs // per_group),
            "group": 256,
        },
    )
    found = out.array(np.float32, (rows, stride)).copy()
    assert (found[:, outputs:] == 7).all(), "wrote beyond its columns"
    return found[:, :outputs]


def inputs(rng: np.random.Generator, rows: int, cols: int) -> tuple[Array, Array, list[Array]]:
    """Rows of both halves, of different sizes, and a gain for each half."""
    embedding = rng.normal(0, 0.02, (rows, cols)).astype(np.float32)
    hidden = rng.normal(0, 3, (rows + 1, cols)).astype(np.float32)
    return embedding, hidden, [rng.uniform(0.5, 1.5, cols).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "group", "rows", "outputs", "cols"),
    [
        ("b4", 32, 1, 37, 96),  # a half of three chunks
        ("b4", 64, 1, 33, 2112),  # a second tile in each half
        ("b8", 64, 2, 65, 64),
        ("b8", 32, 3, 19, 544),
        ("b16", 32, 8, 34, 608),
        ("b4", 128, 5, 9, 128),
    ],
)
def test_both_halves_are_normed_by_themselves(
    sim: Any, kernels: Any, rng: Any, kind: str, group: int, rows: int, outputs: int, cols: int
) -> None:
    weights = quantised(rng, outputs, 2 * cols, kind, group)
    embedding, hidden, gains = inputs(rng, rows, cols)
    sources = np.arange(rows)[::-1] + 1
    library = kernels("combine")
    found = on_every_seed(sim, lambda: combine(sim, library, weights, embedding, hidden, gains, sources))
    joined = np.concatenate([rms(embedding) * gains[0], rms(hidden[sources]) * gains[1]], axis=1)
    assert_near(found, joined @ weights.dense.T, np.abs(joined) @ np.abs(weights.dense.T), 2.0**-22)


@pytest.mark.parametrize("kind", ["b6", "mxfp8"])
def test_other_formats(sim: Any, kernels: Any, rng: Any, kind: str) -> None:
    scale = "uchar" if kind == "mxfp8" else "bfloat"
    library = kernels("combine", "bfloat", f"LILY_FORMAT={kind}", f"LILY_SCALE={scale}")
    weights = quantised(rng, 33, 192, kind, 32)
    embedding, hidden, gains = inputs(rng, 2, 96)
    found = combine(sim, library, weights, embedding, hidden, gains, np.arange(2))
    joined = np.concatenate([rms(embedding) * gains[0], rms(hidden[:2]) * gains[1]], axis=1)
    assert_near(found, joined @ weights.dense.T, np.abs(joined) @ np.abs(weights.dense.T), 2.0**-22)


def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(sim: Any, kernels: Any, rng: Any) -> None:
    weights = quantised(rng, 23, 2304, 4)
    embedding, hidden, gains = inputs(rng, 8, 1152)
    library = kernels("combine")
    together = combine(sim, library, weights, embedding, hidden, gains, np.arange(8))
    for count in (1, 2, 3, 5):
        few = combine(sim, library, weights, embedding[:count], hidden, gains, np.arange(count))
        assert few.tobytes() == together[:count].tobytes()


@pytest.mark.parametrize(("rows", "cols"), [(1, 96), (3, 2080), (9, 544)])
def test_normed_rows_are_the_hidden_rows_of_the_head(
    sim: Any, kernels: Any, rng: Any, rows: int, cols: int
) -> None:
    x = rng.normal(0, 2, (rows, cols)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, cols).astype(np.float32)

    def compute() -> Array:
        out = sim.buffer(4 * rows * cols, "out")
        arguments = {0: sim.buffer(x, "input"), 1: sim.buffer(gain, "gain"), 2: out}
        arguments[3] = structure(cols, EPS)
        library = kernels("combine")
        run(
            sim,
            {"library": library, "kernel": "norm_rows", "arguments": arguments, "groups": rows, "group": 256},
        )
        return out.array(np.float32, (rows, cols)).copy()

    found = on_every_seed(sim, compute)
    np.testing.assert_allclose(found, rms(x) * gain, rtol=2e-6)
    count = min(rows, 8)
    hidden = head(sim, kernels("head"), quantised(rng, 16, cols, 16), x[:count], gain, np.arange(count))[1]
    assert hidden.tobytes() == found[:count].tobytes()
