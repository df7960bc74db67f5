"""What a prompt costs at the real layer pattern: launches and command buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from backend_support import ids_of, load
from oracles.shapes import SHAPES

SHAPE = replace(
    SHAPES["moe"], layers=40, hidden=64, heads=8, kv_heads=1, key_heads=1, value_heads=2, experts=32,
    top_k=8, moe_width=64, shared_width=64,
)  # fmt: skip
DELTA, ATTENTION, ENDS = 14, 13, 1  # launches of a layer of each kind; of the tokens' rows
MOST = 700

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny(SHAPE, "mlx-4bit-g64", dtype="bfloat16")


def test_a_chunk_is_one_command_buffer_of_few_launches(
    metal_lily: ModuleType, sim: Any, folder: Path
) -> None:
    """All launches of a chunk are handed over at once: the host can't have waited for one of them."""
    sim.configure(checks=False)
    chunk = 30 * DELTA + 10 * ATTENTION + ENDS
    assert chunk + 2 <= MOST
    with metal_lily.Engine.load(folder, backend="metal") as engine:
        for length in (9, 100, 512):
            sim.reset_counters()
            engine.prefill(ids_of(SHAPE.vocab, length).tolist())
            counters = sim.counters()
            assert counters["command_buffers"] == counters["encoders"] == 1
            assert counters["dispatches"] == chunk + 1  # the last row's logits
    model = load(folder, chunk=32)
    sim.reset_counters()
    model.forward(model.new_sequence(), ids_of(SHAPE.vocab, 96))
    assert sim.counters()["command_buffers"] == 3
    assert sim.counters()["dispatches"] == 3 * chunk + 1
