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
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

TECHNIQUES = (
    "row_parallel_products", "fused_norms", "fused_adds", "fused_gate_up", "fused_down", "fused_rotary",
    "fused_delta_norm", "gqa_packing", "coalesced_cache_reads", "concurrent_pass", "token_handoff",
)  # fmt: skip
FUSIONS = tuple(name for name in TECHNIQUES if name.startswith("fused_"))
FEW_ROWS = ("matrix_prefill",)


pytestmark = pytest.mark.usefixtures("fast")


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
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCES["logits"])
    assert continued(model, model.new_sequence(), ids, 24, shape.vocab) == text


def test_nothing_at_all_changes_no_more_than_rounding(reference: Any) -> None:
    """Every technique off: the pieces of what was fused have one output per simdgroup too."""
    shape, folder, logits, text = reference
    model, ids = exact(folder, *TECHNIQUES), ids_of(shape.vocab, 66)
    found = logits_in_pieces(model, ids[:17], 8, 1, 2, 4, 1, 1)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCES["logits"])
    assert continued(model, model.new_sequence(), ids, 24, shape.vocab) == text


def test_prompts_of_many_rows_go_before_steps_of_pieces(reference: Any) -> None:
    """The kernels of many rows beside every fusion switched off: appending in pieces is theirs too."""
    shape, folder, _, _ = reference
    ids, found = ids_of(shape.vocab, 66), []
    for names in ((), FUSIONS):
        model = load(folder, kv_dtype="float32", ablate=(*EXACT["ablate"], *names))
        found.append(logits_in_pieces(model, ids, 40, 1, 25))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=TOLERANCES["logits"])


MORE = {  # launches, stages, whether bytes
    "row_parallel_products": (0, 0, False),
    "coalesced_cache_reads": (0, 0, False),
    "fused_norms": (4 + 4, 4 + 4, True),  # before each projection and each router
    "fused_adds": (1, 1, True),  # of attention: after delta_rule the product ends a norm
    "fused_gate_up": (4 * 3, 4 * 2, True),  # the choice of experts, gate beside up, SwiGLU
    "fused_down": (4 * 3, 4 * 2, True),  # down, the weighted sum beside the shared expert, the residual
    "fused_rotary": (2, 2, True),
    "fused_delta_norm": (3, 3, True),
    "gqa_packing": (0, 0, True),  # the cache is read by each query head
    "bf16_activations": (0, 0, True),
    "long_context_blocks": (0, 0, False),  # splits are of a page here anyway
    "concurrent_pass": (0, 0, False),
    "token_handoff": (-1, -1, True),  # no launch that chooses, but logits
}
"""What a token takes without a technique, beyond what it takes with it: three recurrent layers, one of
attention."""


def test_what_a_technique_saves_of_a_token(tiny: Callable[..., Path]) -> None:
    """`lily bench ablate`: without a fusion there are more launches and stages, and results in memory."""
    ablate = importlib.import_module("lily_py.bench.ablate_metal")
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    everything, *less = ablate.count_ablations(folder, names=tuple(MORE), context=8, decode=2)
    for cost in less:
        launches, stages, more_bytes = MORE[cost.switched_off]
        with_it, without = everything.token.counts, cost.token.counts
        assert without["launches"] - with_it["launches"] == launches, cost.switched_off
        assert without["stages"] - with_it["stages"] == stages, cost.switched_off
        moved = [counts["bytes read"] + counts["bytes written"] for counts in (without, with_it)]
        share = moved[0] / moved[1] - 1
        assert share > 0 if more_bytes else abs(share) < 0.001, cost.switched_off
        if cost.switched_off == "concurrent_pass":
            assert cost.token.counts["barriers"] == 0  # the pass itself is in order


def test_what_a_fusion_saves_of_a_token_of_a_dense_model(tiny: Callable[..., Path]) -> None:
    """Its own are the products of the dense layers: gate beside up, SwiGLU, and down before the residual."""
    ablate = importlib.import_module("lily_py.bench.ablate_metal")
    folder = tiny(replace(SHAPES["dense"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    names = ("fused_gate_up", "fused_adds", "fused_down")
    everything, *less = ablate.count_ablations(folder, names=names, context=8, decode=2)
    more = [cost.token.counts["launches"] - everything.token.counts["launches"] for cost in less]
    assert more == [4 * 2, 1 + 4, 0]


def test_one_output_per_simdgroup_reads_inputs_more_often(sim: Any, tiny: Callable[..., Path]) -> None:
    """Each threadgroup stages the input: for 8 outputs instead of up to 64."""
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    loaded, distinct = [], []
    for names in ((), ("row_parallel_products",)):
        model = load(folder, ablate=(*FEW_ROWS, *names))
        sequence = model.new_sequence()
        model.forward(sequence, ids_of(300, 4))
        sim.reset_counters()
        model.forward(sequence, ids_of(300, 1))
        loaded.append(sim.counters()["bytes_loaded"])
        distinct.append(sim.counters()["bytes_read"])
    assert sim.diagnostics() == []
    assert loaded[1] > 1.5 * loaded[0]
    assert distinct[1] == pytest.approx(distinct[0], rel=0.05)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_nothing_fused_has_no_fault_and_no_schedule_shows(
    sim: Any, tiny: Callable[..., Path], name: str
) -> None:
    """Prompts and steps of one to eight rows with all fusions off, under the checker, three seeds."""
    shape = replace(SHAPES[name], layers=4)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), ablate=(*FEW_ROWS, *FUSIONS))
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        sequence, other = model.new_sequence(), model.new_sequence()
        tokens = continued(model, sequence, ids_of(shape.vocab, 11), 4, shape.vocab)
        model.forward(other, ids_of(shape.vocab, 2))
        logits = model.forward_each([sequence, other], np.array([1, 2], np.int32))
        results.append((tokens, logits.tobytes()))
    assert sim.diagnostics() == []
    assert results[0] == results[1] == results[2]
