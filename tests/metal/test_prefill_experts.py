"""Mixture of experts for many rows, from logits to the residual: skewed, empty and overfull experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from metal_reference import (
    ACTIVATIONS,
    Array,
    Weights,
    assert_near,
    launched,
    on_every_seed,
    quantised,
    silu,
    structure,
)
from prefill_reference import PATHS, SIMDGROUP, MatrixPath, expanded, stacked, swiglu
from test_metal_experts import Mixture, Shape, chosen
from test_prefill_routing import capacity, launches

SHAPES = {
    "odd": Shape(),
    "no shared": Shape(experts=20, top_k=5, hidden=96, width=96, shared_width=0),
    "eight bits, all experts weigh": Shape(
        experts=9, top_k=4, normalize=False, format="b8", shared_format="b8"
    ),
    "shared in eight bits, wider": Shape(shared_format="b8", experts=11, top_k=2, width=32),
    "shared narrower": Shape(experts=5, top_k=2, width=96, shared_width=32),
    "plain weights": Shape(format="b16", shared_format="b16", hidden=64),
}


def structure_of(s: Shape, shift: int, part: int) -> bytes:
    """ExpertRowsShape."""
    return structure(
        s.experts, s.top_k, s.slots, s.width, s.shared_width, s.stride, s.hidden, shift, shift, part
    )


def mixture_of_rows(
    sim: Any, kernels: Any, path: MatrixPath, activation: str, mixture: Mixture, normed: Array, logits: Array,
    before: Array, tile: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(residual, activations by entry, entries)."""
    s, rows, dtype = mixture.shape, len(normed), normed.dtype
    matrix, routing_library = path.library(kernels, activation), kernels("routing", activation)
    residual, x = sim.buffer(before, "residual"), sim.buffer(normed, "normed")
    acts = sim.buffer(np.zeros((rows * s.slots, s.stride), dtype), "acts")
    down = sim.buffer(np.zeros((rows * s.slots, s.hidden), dtype), "down")
    parts = (
        [(s.format, 0)]
        if s.format == s.shared_format or not s.shared
        else [(s.format, 1), (s.shared_format, 2)]
    )
    blocks = capacity(s, rows, tile)
    with sim.encoder(concurrent=True) as encoder:
        given = sim.buffer(logits, "logits")
        routing, entries, listed = launches(sim, routing_library, encoder, s, given, rows, tile)
        for kernel, weights, shared, source, target, width in (
            ("experts_up_rows", mixture.up, mixture.shared_up, x, acts, s.stride),
            ("experts_down_rows", mixture.down, mixture.shared_down, acts, down, s.hidden),
        ):
            encoder.barrier()
            arguments = weights.arguments(sim) | shared.arguments(sim, 3)
            arguments |= {6: source, 7: entries, 8: listed, 9: target}
            for suffix, part in parts:
                launched(
                    encoder,
                    library=matrix,
                    kernel=f"{kernel}_{suffix}_t{tile}",
                    arguments=arguments | {10: structure_of(s, weights.group_shift, part)},
                    groups=(-(-width // path.columns(kernel, tile)), blocks),
                    group=path.threads(tile),
                )
        encoder.barrier()
        arguments = {0: down, 1: routing, 2: residual, 3: structure_of(s, 5, 0)}
        groups = (-(-s.hidden // 1024), rows)
        launched(
            encoder, library=kernels("matrix_simdgroup", activation), kernel="combine_rows",
            arguments=arguments, groups=groups, group=256,
        )  # fmt: skip
    assert sim.diagnostics() == []
    return (
        residual.array(np.float32, before.shape).copy(),
        acts.array(dtype, (rows * s.slots, s.stride)).copy(),
        entries.array(np.uint32).copy(),
    )


def inputs(rng: np.random.Generator, s: Shape, rows: int, dtype: Any) -> tuple[Array, Array, Array]:
    """(normed, logits, residual); expert 1 is chosen by all, expert 0 by none."""
    normed = rng.normal(0, 1, (rows, s.hidden)).astype(dtype)
    logits = rng.normal(0, 2, (rows, s.experts + s.shared)).astype(np.float32)
    logits[:, 1], logits[:, 0] = 30, -30
    return normed, logits, rng.normal(0, 1, (rows, s.hidden)).astype(np.float32)


def check(mixture: Mixture, normed: Array, logits: Array, before: Array, found: Any, stored: float) -> None:
    """Gate and up of each entry, then the weighted sum of what down makes of the stored activations."""
    s, dtype = mixture.shape, normed.dtype
    residual, acts, entries = found
    at = {int(entry): i for i, entry in enumerate(entries)}
    wanted = before.astype(np.float64)
    magnitude = np.abs(wanted)
    up = [expanded(w, dtype) for w in (mixture.up, mixture.shared_up)]
    down = [expanded(w, dtype) for w in (mixture.down, mixture.shared_down)]
    for row, x in enumerate(normed.astype(np.float64)):
        experts, weights = chosen(s, logits[row])
        shared_weight = [1 / (1 + np.exp(-np.float64(logits[row, -1])))]
        for slot, weight in enumerate([*weights, *shared_weight][: s.slots]):
            if slot < s.top_k:
                width, e = s.width, experts[slot]
                first, second = (m[e * n : (e + 1) * n] for m, n in ((up[0], 2 * width), (down[0], s.hidden)))
            else:
                width, first, second = s.shared_width, up[1], down[1]
            entry = at[row * s.slots + slot]
            gate, value = np.split(first @ x, 2)
            size = np.split(np.abs(first) @ np.abs(x), 2)
            bound = (np.abs(gate) + size[0]) * (np.abs(value) + size[1])
            assert_near(acts[entry, :width], silu(gate) * value, bound, stored)
            act = acts[entry, :width].astype(np.float64)
            wanted[row] += weight * (second @ act)
            magnitude[row] += weight * (np.abs(second) @ np.abs(act) + stored / 3e-6 * np.abs(second @ act))
    assert_near(residual, wanted, magnitude, 2.0**-22)


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", PATHS)
def test_rows_gain_the_weighted_sum_of_their_experts(
    sim: Any, kernels: Any, rng: Any, path: str, name: str, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s = SHAPES[name]
    mixture = Mixture.random(rng, s)
    normed, logits, before = inputs(rng, s, 19, dtype)
    found = mixture_of_rows(sim, kernels, PATHS[path], activation, mixture, normed, logits, before, 16)
    check(mixture, normed, logits, before, found, stored)


@pytest.mark.parametrize("path", PATHS)
def test_tiles_agree_to_the_bit_on_every_schedule(sim: Any, kernels: Any, rng: Any, path: str) -> None:
    """One row more than two tiles of 32: expert 1 is overfull, expert 0 empty, the others have a few rows."""
    dtype, stored = ACTIVATIONS["bfloat"]
    s = SHAPES["odd"]
    mixture = Mixture.random(rng, s)
    normed, logits, before = inputs(rng, s, 65, dtype)
    results = []
    for tile in PATHS[path].tiles:

        def compute(tile: int = tile) -> Array:
            found = mixture_of_rows(
                sim, kernels, PATHS[path], "bfloat", mixture, normed, logits, before, tile
            )
            results.append(found)
            return found[0]

        on_every_seed(sim, compute) if tile == 32 else compute()
    check(mixture, normed, logits, before, results[0], stored)
    for found in results[1:]:
        assert [part.tobytes() for part in found] == [part.tobytes() for part in results[0]]


def test_blocks_without_rows_read_no_weights(sim: Any, kernels: Any, rng: Any) -> None:
    """Three of sixteen experts are chosen: what is read is theirs, once for each block of rows."""
    s = Shape(experts=16, top_k=2, hidden=256, width=64, shared_width=0)
    mixture = Mixture.random(rng, s)
    normed, logits, before = inputs(rng, s, 20, ACTIVATIONS["bfloat"][0])
    logits[:, [3, 5]] = 20
    logits[::2, 5] = 25
    sim.log_dispatches()
    mixture_of_rows(sim, kernels, SIMDGROUP, "bfloat", mixture, normed, logits, before, 32)
    up = next(work for work in sim.dispatches() if work.kernel.startswith("experts_up"))
    expert = mixture.up.nbytes // 16
    table = 16 * capacity(s, 20, 32) + 4 * 40
    assert 3 * expert < up.bytes_read <= 3 * expert + normed.nbytes + table + 64


@dataclass(frozen=True)
class Apart:
    """Gate and up of each expert as two stacks, of formats of their own, and the shared expert's."""

    shape: Shape
    gates: tuple[Weights, Weights]  # of the routed experts, of the shared one
    ups: tuple[Weights, Weights]

    @staticmethod
    def random(rng: np.random.Generator, s: Shape, gates: tuple[str, str], ups: tuple[str, str]) -> Apart:
        heights = (s.experts * s.width, max(s.shared_width, 32))

        def drawn(formats: tuple[str, str]) -> tuple[Weights, Weights]:
            routed, shared = (
                quantised(rng, height, s.hidden, kind, 32)
                for height, kind in zip(heights, formats, strict=True)
            )
            return routed, shared

        return Apart(s, drawn(gates), drawn(ups))


def products_of_rows(
    sim: Any, kernels: Any, path: MatrixPath, activation: str, kernel: str, s: Shape,
    weights: list[tuple[Weights, Weights]], normed: Array, logits: Array, tile: int,
) -> list[Array]:  # fmt: skip
    """The results of `kernel` by entry [rows slots, stride] for each (routed, shared), then the entries.

    What no block writes is 7.
    """
    rows, dtype = len(normed), normed.dtype
    outs = [sim.buffer(np.full((rows * s.slots, s.stride), 7, dtype), "out") for _ in weights]
    x, blocks = sim.buffer(normed, "normed"), capacity(s, rows, tile)
    with sim.encoder(concurrent=True) as encoder:
        given = sim.buffer(logits, "logits")
        _, entries, listed = launches(sim, kernels("routing", activation), encoder, s, given, rows, tile)
        encoder.barrier()
        for (routed, shared), out in zip(weights, outs, strict=True):
            arguments = routed.arguments(sim) | shared.arguments(sim, 3)
            arguments |= {6: x, 7: entries, 8: listed, 9: out}
            together = routed.format == shared.format or not s.shared
            for kind, part in [(routed.format, 0)] if together else [(routed.format, 1), (shared.format, 2)]:
                launched(
                    encoder,
                    library=path.library(kernels, activation),
                    kernel=f"{kernel}_{kind}_t{tile}",
                    arguments=arguments | {10: structure_of(s, routed.group_shift, part)},
                    groups=(-(-s.stride // path.columns(kernel, tile)), blocks),
                    group=path.threads(tile),
                )
    assert sim.diagnostics() == []
    found = [np.asarray(out.array(dtype, (rows * s.slots, s.stride)).copy()) for out in outs]
    return [*found, entries.array(np.uint32).copy()]


def multiplied(sim: Any, kernels: Any, activation: str, s: Shape, gate: Array, up: Array) -> Array:
    """SwiGLU of products by entry: the routed experts' entries, then the shared one's."""
    acts, routed = np.full_like(gate, 7), len(gate) // s.slots * s.top_k
    parts = [(slice(0, routed), s.top_k, s.width), (slice(routed, None), 1, s.shared_width)]
    for part, slots, width in parts[: 1 + s.shared]:
        before = acts[part].reshape(-1, slots, s.stride)
        found = swiglu(sim, kernels, activation, gate[part], up[part], before, width)
        acts[part] = found.reshape(-1, s.stride)
    return acts


def check_products(s: Shape, weights: tuple[Weights, Weights], normed: Array, logits: Array, found: Array,
                   entries: Array, stored: float) -> None:  # fmt: skip
    """Each entry is the product of its row with its expert's matrix, and nothing behind it is written."""
    matrices = [expanded(w, normed.dtype) for w in weights]
    experts = [chosen(s, row)[0] for row in logits]
    for entry, place in enumerate(entries):
        row, slot = divmod(int(place), s.slots)
        width = s.width if slot < s.top_k else s.shared_width
        e = experts[row][slot] if slot < s.top_k else 0
        matrix = matrices[0 if slot < s.top_k else 1][e * width : (e + 1) * width]
        x = normed[row].astype(np.float64)
        assert_near(found[entry, :width], matrix @ x, np.abs(matrix) @ np.abs(x), stored)
        assert (found[entry, width:] == 7).all()


APART = {
    "four and eight bits": (Shape(), ("b4", "b4"), ("b8", "b8")),
    "each in another": (Shape(experts=11, top_k=2, width=32), ("b4", "b8"), ("b16", "b4")),
    "no shared": (
        Shape(experts=20, top_k=5, hidden=160, width=96, shared_width=0), ("b8", "b8"), ("b4", "b4"),
    ),
    "shared narrower": (Shape(experts=5, top_k=2, width=96, shared_width=32), ("b16", "b8"), ("b8", "b8")),
}  # fmt: skip
"""Shapes, formats of gate and of up: of the routed experts and of the shared one."""


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("path", PATHS)
def test_gate_and_up_of_different_formats_are_products_by_entry(
    sim: Any, kernels: Any, rng: Any, path: str, name: str, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s, gates, ups = APART[name]
    mixture = Apart.random(rng, s, gates, ups)
    normed, logits, _ = inputs(rng, s, 19, dtype)
    gate, up, entries = products_of_rows(
        sim, kernels, PATHS[path], activation, "experts_project_rows", s, [mixture.gates, mixture.ups],
        normed, logits, 16,
    )  # fmt: skip
    check_products(s, mixture.gates, normed, logits, gate, entries, stored)
    check_products(s, mixture.ups, normed, logits, up, entries, stored)
    acts = multiplied(sim, kernels, activation, s, gate, up)
    for entry, place in enumerate(entries):
        width = s.width if place % s.slots < s.top_k else s.shared_width
        wanted = silu(gate[entry, :width]) * up[entry, :width].astype(np.float64)
        assert_near(acts[entry, :width], wanted, np.abs(wanted), stored)
        assert (acts[entry, width:] == 7).all()


@pytest.mark.parametrize("path", PATHS)
def test_gate_and_up_apart_have_the_bytes_of_one_launch(sim: Any, kernels: Any, rng: Any, path: str) -> None:
    """Of one format and with fp32 between them: every tile, overfull, empty and few rows; three schedules."""
    s = SHAPES["odd"]
    mixture = Apart.random(rng, s, ("b4", "b4"), ("b4", "b4"))
    normed, logits, _ = inputs(rng, s, 65, np.float32)
    routed, shared = zip(mixture.gates, mixture.ups, strict=True)
    both = (stacked(*routed, s.experts), stacked(*shared))

    def products(kernel: str, tile: int, *weights: tuple[Weights, Weights]) -> list[Array]:
        return products_of_rows(
            sim, kernels, PATHS[path], "float", kernel, s, list(weights), normed, logits, tile
        )

    def apart(tile: int) -> Array:
        gate, up, _ = products("experts_project_rows", tile, mixture.gates, mixture.ups)
        return multiplied(sim, kernels, "float", s, gate, up)

    for tile in PATHS[path].tiles:
        found = on_every_seed(sim, lambda tile=tile: apart(tile)) if tile == 32 else apart(tile)
        one, _ = products("experts_up_rows", tile, both)
        assert found.tobytes() == one.tobytes()
