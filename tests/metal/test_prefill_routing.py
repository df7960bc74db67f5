"""Routing of many rows: choice, stable sort by expert and the blocks of rows, against plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from metal_reference import Array, launched, on_every_seed, sigmoid, structure
from test_metal_experts import Shape, chosen


def capacity(s: Shape, rows: int, tile: int) -> int:
    """Blocks that are enough for any choice."""
    pairs = rows * s.top_k
    return -(-pairs // tile) + min(s.experts, pairs) + s.shared * -(-rows // tile)


@dataclass(frozen=True)
class Routed:
    """What the three launches leave."""

    routing: Array  # [rows, 2 top_k + shared]
    entries: Array  # [rows slots]
    blocks: Array  # [capacity, 4]


def launches(sim: Any, library: Any, encoder: Any, s: Shape, logits: Any, rows: int, tile: int) -> Any:
    """Encode the routing of `rows` rows; buffers of (routing, entries, blocks)."""
    row_blocks, slots = -(-rows // 32), s.top_k + s.shared
    routing = sim.buffer(4 * rows * (2 * s.top_k + s.shared), "routing")
    picks, counts = sim.buffer(4 * rows * s.top_k, "picks"), sim.buffer(4 * s.experts * row_blocks, "counts")
    entries, blocks = (
        sim.buffer(4 * rows * slots, "entries"),
        sim.buffer(16 * capacity(s, rows, tile), "blocks"),
    )
    sizes = (rows, s.experts, s.top_k, int(s.normalize), s.shared, tile, capacity(s, rows, tile))
    shape = structure(*sizes)
    work = [
        ("choose_rows", {0: logits, 1: routing, 2: picks, 3: counts, 4: shape}, row_blocks, 256),
        ("lay_out", {0: counts, 1: blocks, 2: shape}, 1, 512),
        ("scatter_rows", {0: picks, 1: counts, 2: entries, 3: shape}, -(-rows * slots // 256), 256),
    ]
    for kernel, arguments, groups, group in work:
        encoder.barrier()
        launched(encoder, library=library, kernel=kernel, arguments=arguments, groups=groups, group=group)
    return routing, entries, blocks


def route(sim: Any, kernels: Any, s: Shape, logits: Array, tile: int) -> Routed:
    rows = len(logits)
    with sim.encoder(concurrent=True) as encoder:
        parts = launches(sim, kernels("routing"), encoder, s, sim.buffer(logits, "logits"), rows, tile)
    assert sim.diagnostics() == []
    return Routed(
        parts[0].array(np.float32, (rows, -1)).copy(),
        parts[1].array(np.uint32).copy(),
        parts[2].array(np.uint32, (-1, 4)).copy(),
    )


def check(s: Shape, logits: Array, tile: int, found: Routed) -> None:
    """Weights, the stable order, and blocks that cover every entry once, in plain Python."""
    rows, slots = len(logits), s.top_k + s.shared
    picked: dict[int, list[int]] = {e: [] for e in range(s.experts)}
    for row in range(rows):
        experts, weights = chosen(s, logits[row])
        assert found.routing[row, s.top_k : 2 * s.top_k].tolist() == experts
        np.testing.assert_allclose(found.routing[row, : s.top_k], weights, rtol=2e-6)
        if s.shared:
            np.testing.assert_allclose(found.routing[row, -1], sigmoid(logits[row, -1]), rtol=2e-6)
        for slot, expert in enumerate(experts):
            picked[expert].append(row * slots + slot)
    order = [entry for e in range(s.experts) for entry in picked[e]]
    order += [row * slots + s.top_k for row in range(rows)] if s.shared else []
    assert found.entries.tolist() == order
    wanted = []
    groups = [(s.experts, rows * s.top_k, rows)] if s.shared else []
    first = 0
    for expert, entries in picked.items():
        groups.append((expert, first, len(entries)))
        first += len(entries)
    for expert, first, count in groups:
        wanted += [[expert, first + at, min(tile, count - at), 0] for at in range(0, count, tile)]
    assert len(wanted) <= len(found.blocks)
    assert found.blocks[: len(wanted)].tolist() == wanted
    assert not found.blocks[len(wanted) :].any()


MIXTURES = {
    "odd": Shape(experts=9, top_k=3),
    "one of two": Shape(experts=2, top_k=1),
    "no shared, all weigh": Shape(experts=70, top_k=10, shared_width=0, normalize=False),
    "most experts": Shape(experts=512, top_k=32),
    "the 35B model": Shape(experts=256, top_k=8),
}


@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_are_sorted_by_expert_in_blocks(sim: Any, kernels: Any, rng: Any, name: str, rows: int) -> None:
    s = MIXTURES[name]
    logits = rng.normal(0, 2, (rows, s.experts + s.shared)).astype(np.float32)
    check(s, logits, 16, route(sim, kernels, s, logits, 16))


@pytest.mark.parametrize("tile", [8, 16, 32, 64])
def test_skewed_empty_and_overfull_experts(sim: Any, kernels: Any, rng: Any, tile: int) -> None:
    """All rows choose expert 7, most choose 30, the first four and the last are empty."""
    s = Shape(experts=33, top_k=3)
    logits = rng.normal(0, 1, (tile * 2 + 1, s.experts + 1)).astype(np.float32)
    logits[:, 7] = 50
    logits[: tile + 1, 30] = 40
    logits[:, [0, 1, 2, 3, 32]] = -40

    def compute() -> Array:
        found = route(sim, kernels, s, logits, tile)
        check(s, logits, tile, found)
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in vars(found).values()])

    on_every_seed(sim, compute)


def test_every_row_the_same_choice_and_each_its_own(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(experts=40, top_k=4, shared_width=0)
    equal = np.zeros((40, 40), np.float32)  # ties: experts 0 to 3 for all
    check(s, equal, 32, route(sim, kernels, s, equal, 32))
    apart = np.zeros((10, 40), np.float32)
    for row in range(10):
        apart[row, 4 * row : 4 * row + 4] = 3  # no expert twice: as many blocks as the capacity allows
    found = route(sim, kernels, s, apart, 32)
    check(s, apart, 32, found)
    assert np.count_nonzero(found.blocks[:, 2]) == 40


def test_more_row_blocks_than_a_simdgroup_has_lanes(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(experts=5, top_k=2)
    logits = rng.normal(0, 2, (32 * 33 + 5, 6)).astype(np.float32)
    check(s, logits, 64, route(sim, kernels, s, logits, 64))
