"""Prompts of checkpoints that mix formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backend_support import EXACT, ids_of, load
from oracles.reference import Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

MOE = replace(SHAPES["moe"], layers=2, interval=2)


pytestmark = pytest.mark.usefixtures("fast")


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
