"""Each technique of a decode step switched off alone: the same results, at the cost that it avoids."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, continued, ids_of, load
from oracles.shapes import SHAPES

TECHNIQUES = (
    "row_parallel_products", "fused_norms", "fused_adds", "fused_gate_up", "fused_down", "fused_rotary",
    "fused_delta_norm", "gqa_packing", "coalesced_cache_reads", "concurrent_pass", "token_handoff",
)  # fmt: skip
FUSIONS = tuple(name for name in TECHNIQUES if name.startswith("fused_"))
FEW_ROWS = ("matrix_prefill",)


@pytest.fixture(autouse=True)
def fast(metal_lily: ModuleType, loaded_simulator: Any) -> None:
    """Kernels without the checker, but for tests that switch it on."""
    loaded_simulator.configure(checks=False)


def exact(folder: Path, *without: str) -> Any:
    return load(folder, kv_dtype="float32", ablate=(*EXACT["ablate"], *FEW_ROWS, *without))


def logits_in_pieces(model: Any, ids: Any, *pieces: int) -> Any:
    sequence, found, at = model.new_sequence(), [], 0
    for size in pieces:
        found.append(model.forward(sequence, ids[at : at + size], all=True))
        at += size
    return np.concatenate(found)


@pytest.fixture(scope="module", params=["moe", "dense"])
def reference(request: Any, metal_lily: ModuleType, tiny: Callable[..., Path]) -> tuple[Any, Path, Any, Any]:
    """Shape, folder, logits of a prompt in pieces of each number of rows, and the text after it."""
    shape = replace(SHAPES[request.param], layers=4)
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    model, ids = exact(folder), ids_of(shape.vocab, 66)
    text = continued(model, model.new_sequence(), ids, 24, shape.vocab)
    return shape, folder, logits_in_pieces(model, ids[:17], 8, 1, 2, 4, 1, 1), text


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_changes_no_more_than_rounding(reference: Any, name: str) -> None:
    shape, folder, logits, text = reference
    model, ids = exact(folder, name), ids_of(shape.vocab, 66)
    found = logits_in_pieces(model, ids[:17], 8, 1, 2, 4, 1, 1)
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5)
    assert continued(model, model.new_sequence(), ids, 24, shape.vocab) == text
