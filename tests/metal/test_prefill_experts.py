"""Mixture of experts for many rows, from logits to the residual: skewed, empty and overfull experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import ACTIVATIONS, Array, assert_near, launched, on_every_seed, silu, structure
from prefill_reference import PATHS, SIMDGROUP, MatrixPath, expanded
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
