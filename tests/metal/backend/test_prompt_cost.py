"""What prompts of each length cost, counted: no length is much dearer than the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from backend_support import load, prompt
from oracles.shapes import SHAPES

SHAPE = replace(
    SHAPES["moe"], layers=2, interval=2, hidden=256, heads=2, kv_heads=1, key_heads=1, value_heads=2,
    experts=64, top_k=4, moe_width=128, shared_width=128,
)  # fmt: skip
LENGTHS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
"""Each side of the few-row kernels' end, and of the tiles of products and experts."""


@pytest.mark.parametrize(
    ("gpu", "multiply_adds"), [(("applegpu_g13g", 7), 19), (("applegpu_g17s", 10), 46)], ids=["M1", "M5"]
)
def test_no_length_falls_off_a_cliff(
    metal_lily: ModuleType, sim: Any, tiny: Callable[..., Path], gpu: tuple[str, int], multiply_adds: int
) -> None:
    """The longer of both: bytes moved, and multiply-adds, of which the chip does `multiply_adds` per byte.

    A row more costs a quarter more at most, and a row of more is at most a twentieth dearer.
    """
    sim.configure(checks=False, gpu=gpu, macos=(26, 2))
    model = load(tiny(SHAPE, "mlx-4bit-g64", dtype="bfloat16"))
    costs = {}
    for length in LENGTHS:
        spent = prompt(model, SHAPE, length)[2]
        assert spent["command buffers"] == 1
        costs[length] = (
            max(spent["bytes read"] + spent["bytes written"], spent["multiply-adds"] / multiply_adds),
            spent["launches"],
        )
    for shorter, longer in pairwise(LENGTHS):
        (less, launches), (more, more_launches) = costs[shorter], costs[longer]
        assert more / longer < 1.05 * less / shorter, (shorter, longer, costs)
        if longer == shorter + 1:
            assert more < 1.25 * less, (shorter, longer, costs)
            assert more_launches < 2.5 * launches
