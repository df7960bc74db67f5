"""Prompts that attend in splits: at long contexts, which are given here rather than computed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, ids_of, load, with_positions
from numpy.typing import NDArray
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES, Shape
from test_prompt_counts import ATTENTION, DELTA, ENDS, MOST
from test_prompt_counts import SHAPE as LAYERS_40

Bytes = NDArray[np.uint8]
PAGE = 64
SPLIT = 16_384
"""Positions of a split."""
LONGEST = 262_144
FILLING = 160
"""Tiles from which on a block's splits are walked."""
APART = 64
"""Rows that have the memory for splits apart at any length."""
BLOCK = 2048
"""Rows of a block."""


@pytest.fixture(autouse=True)
def fast(metal_lily: ModuleType, sim: Any) -> None:
    """Kernels without the checker, and memory for long contexts."""
    sim.configure(checks=False, working_set=16 << 30)


def random_pages(shape: Shape, count: int) -> list[Bytes]:
    """Pages of fp32 keys and values; keys are large enough for few positions to have most of the weight."""
    rng = np.random.default_rng(5)
    size = (shape.layers // shape.interval, shape.kv_heads, 2, PAGE * shape.head_dim)
    scale = np.array([3, 1], np.float32)[:, None]
    return [(rng.normal(0, 1, size) * scale).astype(np.float32).view(np.uint8).ravel() for _ in range(count)]


def continued_from(model: Any, shape: Shape, length: int, pages: list[Bytes]) -> Any:
    """A sequence of `length` tokens with the keys and values of `pages` and an empty recurrent state."""
    core = importlib.import_module("lily_py._core")
    state = np.zeros(model.recurrent_bytes, np.uint8)
    return core.restore_sequence(core.restore_prefix(model, ids_of(shape.vocab, length), pages, state), [])


def fed(model: Any, sequence: Any, ids: Any, blocks: tuple[int, ...]) -> tuple[Any, list[int]]:
    """Logits of all rows, fed in `blocks`, and the launches of each, heads apart."""
    logits, launches, first = [], [], 0
    for rows in blocks:
        before = model.counts["launches"]
        logits.append(model.forward(sequence, ids[first : first + rows], all=True))
        # A head's launch has up to eight rows.
        launches.append(model.counts["launches"] - before - -(-rows // 8))
        first += rows
    assert first == len(ids)
    return np.concatenate(logits), launches


@dataclass(frozen=True)
class Runs:
    """Rows of a model's context from `length` to its end.

    Each run: rows of a block at most, rows that are fed at once, whether these walk.
    """

    heads: int
    kv_heads: int
    length: int
    runs: tuple[tuple[int, tuple[int, ...], tuple[bool, ...]], ...]


SMALL = 80
"""Rows of a block with cells for no more than APART rows apart."""
RUNS = {
    # A tile has one row of each KV head, so that FILLING tiles are 80 rows.
    "two splits, from the end of the first": Runs(
        64, 2, SPLIT - 7,
        ((BLOCK, (80, 9), (True, False)), (BLOCK, (79, 10), (False, False))),
    ),
    "sixteen splits, to the end of the last": Runs(
        2, 1, LONGEST - 74,
        ((SMALL, (APART + 1, 9), (True, False)), (SMALL, (APART, 10), (False, False))),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_walked_and_joined_splits_have_the_same_bits_beside_any_rows(
    tiny: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """Blocks on both sides of the limits of what is walked.

    The logits are the CPU's within the distance of fp32 arithmetic.
    """
    case = RUNS[name]
    shape = replace(SHAPES["moe"], layers=2, interval=2, heads=case.heads, kv_heads=case.kv_heads)
    ids = ids_of(shape.vocab, sum(case.runs[0][1]), seed=1)
    positions = case.length + len(ids)  # no more: a longer context has more cells
    folder = with_positions(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), tmp_path / "long", positions)
    pages = random_pages(shape, -(-case.length // PAGE))
    results = []
    for chunk, blocks, walks in case.runs:
        model = load(folder, chunk=chunk, **EXACT)
        sequence = continued_from(model, shape, case.length, pages)
        logits, launches = fed(model, sequence, ids, blocks)
        assert launches == [DELTA + ATTENTION + ENDS + (not walked) for walked in walks]
        results.append((logits.tobytes(), sequence.recurrent_state(0).tobytes()))
    assert all(result == results[0] for result in results)
    cpu = load(folder, "cpu", kv_dtype="float32", ablate=("integer_dot",), threads=2)
    wanted = cpu.forward(continued_from(cpu, shape, case.length, pages), ids, all=True)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCES["logits"])


def test_a_chunk_of_40_layers_has_few_launches_at_any_length(
    metal_lily: ModuleType, sim: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """They are counted as they are handed over; the simulated GPU then fails instead of running them.

    A tile has four rows. Attention needs a second launch where splits are joined.
    """
    shape = replace(LAYERS_40, head_dim=32)
    folder = with_positions(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), tmp_path / "long", LONGEST)
    model = load(folder)
    chunk = 30 * DELTA + 10 * ATTENTION + ENDS
    apart = BLOCK // (LONGEST // SPLIT)  # a cell of memory for each split
    for length, rows, joins in (
        (SPLIT, 9, 0),
        (SPLIT + 1, 9, 10),
        (SPLIT + 1, 4 * (FILLING - 1), 10),
        (SPLIT + 1, 4 * (FILLING - 1) + 1, 0),
        (131_072, BLOCK, 0),
        (LONGEST, 9, 10),
        (LONGEST, apart, 10),
        (LONGEST, apart + 1, 0),
        (LONGEST, BLOCK, 0),
    ):
        before = length - rows
        pages = [np.zeros(PAGE * model.kv_bytes_per_token, np.uint8)] * -(-before // PAGE)
        sequence = continued_from(model, shape, before, pages)
        launches = model.counts["launches"]
        sim.inject("command_buffer", code=2, repeat=100)
        with pytest.raises(metal_lily.BackendError, match="injected"):
            model.forward(sequence, ids_of(shape.vocab, rows))
        sim.clear_faults()
        launches = model.counts["launches"] - launches - 1  # the head
        assert launches == chunk + joins, (length, rows)
        assert launches <= MOST
