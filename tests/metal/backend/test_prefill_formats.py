"""Prompts of checkpoints that mix formats, and prompts that attend in splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, ids_of, load, state_bytes, with_positions
from oracles.reference import Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

MOE = replace(SHAPES["moe"], layers=2, interval=2)


@pytest.fixture(autouse=True)
def fast(metal_lily: ModuleType, loaded_simulator: Any) -> None:
    """Kernels without the checker."""
    loaded_simulator.configure(checks=False)


def test_a_shared_gate_of_another_format_than_the_router_is_a_launch_of_its_own(
    tiny: Callable[..., Path],
) -> None:
    folder = tiny(MOE, "mlx-4bit-g64", dtype="bfloat16", overrides=(("*.mlp.shared_expert_gate", None),))
    ids = ids_of(MOE.vocab, 20)
    mixed, uniform = load(folder, **EXACT), load(tiny(MOE, "mlx-4bit-g64", dtype="bfloat16"), **EXACT)
    found = mixed.forward(mixed.new_sequence(), ids, all=True)
    np.testing.assert_allclose(found, Reference(folder).forward(ids).logits, atol=TOLERANCES["logits"])
    uniform.forward(uniform.new_sequence(), ids, all=True)
    assert mixed.counts["launches"] - uniform.counts["launches"] == MOE.layers
    assert mixed.counts["passes"] == uniform.counts["passes"]


@pytest.mark.slow
def test_rows_beyond_a_split_have_the_same_bits_beside_any_others(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Attention of many rows is split at 16,384 positions: blocks that end before and after that place.

    The logits are the CPU's within the distance of fp32 arithmetic.
    """
    shape = replace(MOE, heads=2, kv_heads=1, head_dim=64)
    folder = with_positions(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), tmp_path / "long", 20_000)
    ids = ids_of(shape.vocab, 16_444)
    model, results = load(folder, **EXACT), []
    for first in (16_380, 16_400):
        sequence = model.new_sequence()
        model.forward(sequence, ids[:first])
        before = model.counts["launches"]
        logits = model.forward(sequence, ids[first:])
        results.append((logits.tobytes(), state_bytes(sequence, 1, 1)))
        launches = model.counts["launches"] - before
    assert results[0] == results[1]
    short = model.new_sequence()
    before = model.counts["launches"]
    model.forward(short, ids[:44])
    assert launches == model.counts["launches"] - before + 1  # splits are joined
    cpu = load(folder, "cpu", kv_dtype="float32", ablate=("integer_dot",), threads=2)
    wanted = cpu.forward(cpu.new_sequence(), ids)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCES["logits"])
