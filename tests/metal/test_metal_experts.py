"""Mixture of experts: the router's choice, gate and up, down and the weighted sum, at odd shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from metal_reference import (
    ACTIVATIONS,
    EPS,
    Array,
    Weights,
    assert_near,
    on_every_seed,
    quantised,
    rms,
    run,
    sigmoid,
    silu,
    structure,
)


@dataclass(frozen=True)
class Shape:
    """One mixture; formats of the experts and of the shared one (width 0: there is none)."""

    experts: int = 9
    top_k: int = 3
    hidden: int = 96
    width: int = 64
    shared_width: int = 128
    format: str = "b4"
    shared_format: str = "b4"
    normalize: bool = True

    @property
    def shared(self) -> int:
        return int(self.shared_width > 0)

    @property
    def slots(self) -> int:
        return self.top_k + self.shared

    @property
    def stride(self) -> int:
        return max(self.width, self.shared_width)

    def structure(self, group_shift: int, first: int, count: int) -> bytes:
        return structure(
            self.experts, self.top_k, int(self.normalize), self.shared, first, count, self.width,
            self.shared_width, self.stride, self.slots, self.hidden, group_shift, group_shift,
        )  # fmt: skip

    def launches(self) -> list[tuple[str, int, int]]:
        """(format, first slot, slots): one, or two if the shared expert has another format."""
        if not self.shared or self.format == self.shared_format:
            return [(self.format, 0, self.slots)]
        return [(self.format, 0, self.top_k), (self.shared_format, self.top_k, 1)]


SHAPES = {
    "odd": Shape(),
    "one of two": Shape(experts=2, top_k=1, hidden=32, width=32, shared_width=32),
    "no shared": Shape(experts=70, top_k=10, hidden=160, width=96, shared_width=0),
    "all experts weigh": Shape(experts=33, top_k=4, normalize=False, format="b8", shared_format="b8"),
    "plain weights": Shape(format="b16", shared_format="b16", hidden=64),
    "shared in eight bits": Shape(shared_format="b8", experts=40, top_k=8),
    "several fills": Shape(width=576, shared_width=544, top_k=10, experts=12, hidden=64),
}


@dataclass(frozen=True)
class Mixture:
    """Random weights of a shape. Experts are stacked: gate above up, and down."""

    shape: Shape
    up: Weights
    down: Weights
    shared_up: Weights
    shared_down: Weights

    @staticmethod
    def random(rng: np.random.Generator, s: Shape, group: int = 32) -> Mixture:
        wide = max(s.shared_width, 32)
        return Mixture(
            s,
            quantised(rng, s.experts * 2 * s.width, s.hidden, s.format, group),
            quantised(rng, s.experts * s.hidden, s.width, s.format, group),
            quantised(rng, 2 * wide, s.hidden, s.shared_format, group),
            quantised(rng, s.hidden, wide, s.shared_format, group),
        )

    def slot(self, weights: Weights, shared: Weights, expert: int | None) -> Array:
        """The matrix of an expert, or of the shared one."""
        if expert is None:
            return shared.dense
        rows = len(weights.dense) // self.shape.experts
        return weights.dense[expert * rows : (expert + 1) * rows]


def chosen(shape: Shape, logits: Array) -> tuple[list[int], Array]:
    """Experts of a row and their weights, in float64; lower numbers first among equals."""
    wide = logits[: shape.experts].astype(np.float64)
    order = sorted(range(shape.experts), key=lambda e: (-wide[e], e))[: shape.top_k]
    exponentials = np.exp(wide - wide.max())
    total = exponentials[order].sum() if shape.normalize else exponentials.sum()
    return order, exponentials[order] / total


def up(
    sim: Any, library: Any, mixture: Mixture, normed: Array, logits: Array, dtype: Any, columns: int = 32
) -> tuple[Array, Array]:
    """Activations [rows, slots, stride] and routing [rows, 2 top_k + shared]."""
    s, rows = mixture.shape, len(normed)
    out = sim.buffer(np.zeros((rows, s.slots, s.stride), dtype), "out")
    routing = sim.buffer(np.zeros((rows, 2 * s.top_k + s.shared), np.float32), "routing")
    arguments = mixture.up.arguments(sim) | mixture.shared_up.arguments(sim, 3)
    arguments |= {6: sim.buffer(normed, "normed"), 7: sim.buffer(logits, "logits"), 8: out, 9: routing}
    for suffix, first, count in s.launches():
        width = s.shared_width if first else s.stride
        run(
            sim,
            {
                "library": library,
                "kernel": f"experts_up_{suffix}",
                "arguments": arguments | {10: s.structure(mixture.up.group_shift, first, count)},
                "groups": (-(-width // columns), count, rows),
                "group": 256,
            },
        )
    return (
        out.array(dtype, (rows, s.slots, s.stride)).copy(),
        routing.array(np.float32, (rows, 2 * s.top_k + s.shared)).copy(),
    )


def down(
    sim: Any,
    library: Any,
    mixture: Mixture,
    acts: Array,
    routing: Array,
    before: Array,
    simdgroups: int = 4,
    outputs: int = 4,  # of a simdgroup
) -> Array:
    s, rows = mixture.shape, len(acts)
    residual = sim.buffer(before, "residual")
    arguments = mixture.down.arguments(sim) | mixture.shared_down.arguments(sim, 3)
    arguments |= {6: sim.buffer(acts, "acts"), 7: sim.buffer(routing, "routing"), 8: residual}
    run(
        sim,
        *(
            {
                "library": library,
                "kernel": f"experts_down_{suffix}",
                "arguments": arguments | {9: s.structure(mixture.down.group_shift, first, count)},
                "groups": (-(-s.hidden // (outputs * simdgroups)), 1, rows),
                "group": 32 * simdgroups,
            }
            for suffix, first, count in s.launches()
        ),
    )
    return residual.array(np.float32, (rows, s.hidden)).copy()


def routed(rng: np.random.Generator, s: Shape, rows: int, dtype: Any) -> tuple[Array, Array]:
    normed = rng.normal(0, 1, (rows, s.hidden)).astype(dtype)
    logits = rng.normal(0, 2, (rows, s.experts + s.shared)).astype(np.float32)
    return normed, logits


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("name", SHAPES)
def test_chosen_experts_and_the_shared_one_fill_their_slots(
    sim: Any, kernels: Any, rng: Any, name: str, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s = SHAPES[name]
    mixture = Mixture.random(rng, s)
    normed, logits = routed(rng, s, 2, dtype)
    library = kernels("experts", activation)
    first = up(sim, library, mixture, normed, logits, dtype)
    found = on_every_seed(sim, lambda: up(sim, library, mixture, normed, logits, dtype)[0])
    routing = first[1]
    for row in range(2):
        experts, weights = chosen(s, logits[row])
        assert routing[row, s.top_k : 2 * s.top_k].tolist() == experts
        np.testing.assert_allclose(routing[row, : s.top_k], weights, rtol=2e-6)
        if s.shared:
            np.testing.assert_allclose(routing[row, -1], sigmoid(logits[row, -1]), rtol=2e-6)
        x = normed[row].astype(np.float64)
        for slot, expert in enumerate([*experts, None][: s.slots]):
            matrix = mixture.slot(mixture.up, mixture.shared_up, expert)
            gate, up_ = np.split(matrix @ x, 2)
            size = np.split(np.abs(matrix) @ np.abs(x), 2)
            magnitude = (np.abs(gate) + size[0]) * (np.abs(up_) + size[1])
            assert_near(found[row, slot, : len(gate)], silu(gate) * up_, magnitude, stored)


@pytest.mark.parametrize("simdgroups", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_down_adds_the_weighted_sum_of_the_slots(
    sim: Any, kernels: Any, rng: Any, name: str, simdgroups: int
) -> None:
    s = SHAPES[name]
    dtype = ACTIVATIONS["bfloat"][0]
    mixture = Mixture.random(rng, s)
    acts = rng.normal(0, 1, (2, s.slots, s.stride)).astype(dtype)
    before = rng.normal(0, 1, (2, s.hidden)).astype(np.float32)
    routing = np.zeros((2, 2 * s.top_k + s.shared), np.float32)
    routing[:, : s.top_k] = rng.uniform(0, 1, (2, s.top_k))
    routing[:, s.top_k : 2 * s.top_k] = [rng.permutation(s.experts)[: s.top_k] for _ in range(2)]
    if s.shared:
        routing[:, -1] = rng.uniform(0, 1, 2)
    library = kernels("experts")
    found = on_every_seed(sim, lambda: down(sim, library, mixture, acts, routing, before, simdgroups))
    wanted = before.astype(np.float64)
    magnitude = np.abs(wanted)
    for row in range(2):
        experts = [*routing[row, s.top_k : 2 * s.top_k].astype(int), None][: s.slots]
        weights = [*routing[row, : s.top_k], routing[row, -1]]
        for slot, expert in enumerate(experts):
            matrix = mixture.slot(mixture.down, mixture.shared_down, expert)
            x = acts[row, slot, : matrix.shape[1]].astype(np.float64)
            wanted[row] += weights[slot] * (matrix @ x)
            magnitude[row] += weights[slot] * (np.abs(matrix) @ np.abs(x))
    assert_near(found, wanted, magnitude, 2.0**-22)


def test_equal_logits_choose_the_lowest_numbers_and_nan_shows(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(experts=40, top_k=4, hidden=32, width=32, shared_width=0)
    mixture = Mixture.random(rng, s)
    normed, logits = routed(rng, s, 3, np.float32)
    logits[0] = 0.0
    logits[0, 5] = -0.0
    logits[1, [3, 17, 35, 36]] = 9.0
    logits[2, 38] = np.nan
    _, routing = up(sim, kernels("experts", "float"), mixture, normed, logits, np.float32)
    assert routing[0, 4:].tolist() == [0, 1, 2, 3]
    assert routing[1, 4:].tolist() == [3, 17, 35, 36]
    assert np.isnan(routing[2, :4]).all()


@pytest.mark.parametrize(
    ("bits", "rows", "experts", "cols"), [(8, 1, 256, 96), (8, 3, 20, 1056), (4, 8, 7, 64), (16, 2, 33, 64)]
)
def test_route_gives_logits_of_the_normed_row_and_the_row(
    sim: Any, kernels: Any, rng: Any, bits: int, rows: int, experts: int, cols: int
) -> None:
    weights = quantised(rng, experts + 1, cols, bits, 32)
    x = rng.normal(0, 2, (rows, cols)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    wanted = rms(x) * gain
    normed = sim.buffer(np.zeros((rows, cols), np.float32), "normed")

    def compute() -> Array:
        logits = sim.buffer(np.zeros((rows, experts + 1), np.float32), "logits")
        arguments = weights.arguments(sim) | {3: sim.buffer(x, "input"), 4: sim.buffer(gain, "gain")}
        arguments |= {5: logits, 6: normed}
        arguments[7] = structure(rows, cols, experts + 1, experts + 1, weights.group_shift, EPS, 1)
        m = next(m for m in (1, 2, 4, 8) if m >= rows)
        run(
            sim,
            {
                "library": kernels("experts", "float"),
                "kernel": f"route_b{bits}_m{m}",
                "arguments": arguments,
                "groups": -(-(experts + 1) // 16),
                "group": 256,
            },
        )
        return logits.array(np.float32, (rows, experts + 1)).copy()

    found = on_every_seed(sim, compute)
    assert_near(found, wanted @ weights.dense.T, np.abs(wanted) @ np.abs(weights.dense.T), 2.0**-22)
    np.testing.assert_allclose(normed.array(np.float32, (rows, cols)), wanted, rtol=2e-6)


def test_only_chosen_experts_are_read(sim: Any, kernels: Any, rng: Any) -> None:
    """The widths of the 35B model, 16 experts instead of 256: nine slots' bytes, loads below 1.6 times."""
    s = replace(Shape(), experts=16, top_k=8, hidden=2048, width=512, shared_width=512)
    weights = [
        quantised(rng, count, cols, 4)
        for count, cols in ((16 * 1024, 2048), (16 * 2048, 512), (1024, 2048), (2048, 512))
    ]
    mixture = Mixture(s, *weights)
    dtype = ACTIVATIONS["bfloat"][0]
    normed, logits = routed(rng, s, 1, dtype)
    sim.log_dispatches()
    acts, routing = up(sim, kernels("experts"), mixture, normed, logits, dtype)
    down(sim, kernels("experts"), mixture, acts, routing, np.zeros((1, 2048), np.float32))
    for work, stacked, shared in zip(sim.dispatches(), weights[:2], weights[2:], strict=True):
        needed = stacked.nbytes // 2 + shared.nbytes
        assert needed <= work.bytes_read <= 1.01 * needed
        assert work.bytes_loaded < 1.6 * needed
