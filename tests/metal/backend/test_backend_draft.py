"""The multi-token prediction head on both backends: its logits beside float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, continued, ids_of, load, sampler_of
from oracles.reference import MtpHead, Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

PIECES = (12, 1, 8, 3)
BACKENDS = {"metal": EXACT, "cpu": {"ablate": ("integer_dot",), "kv_dtype": "float32"}}


pytestmark = pytest.mark.usefixtures("fast")


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_a_head_predicts_from_the_hidden_rows_of_the_pass_before(
    tiny: Callable[..., Path], name: str, backend: str
) -> None:
    """A text in pieces of many and of few rows, then drafts of drafts, from the head's own rows."""
    shape = replace(SHAPES[name], layers=4)
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16", mtp=True)
    model, text = load(folder, backend, **BACKENDS[backend]), ids_of(shape.vocab, sum(PIECES) + 1)
    sequence, head, found, at = model.new_sequence(), model.new_head_sequence(), [], 0
    for size in PIECES:
        found.append(model.draft(sequence, head, text[at : at + size], text[at + 1 : at + size + 1]))
        at += size
    reference = Reference(folder)
    steps = MtpHead(reference)
    result = steps.step(text[1:], reference.forward(text[:-1]).hidden)
    np.testing.assert_allclose(np.concatenate(found), result.logits, atol=TOLERANCES["logits"])
    hidden = result.hidden[-1:]
    for token in (7, 8):
        logits = model.draft(sequence, head, ids(), ids(token))
        result = steps.step(ids(token), hidden)
        np.testing.assert_allclose(logits, result.logits, atol=TOLERANCES["logits"])
        hidden = result.hidden
    assert sequence.length == len(text) - 1
    assert head.length == len(text) + 1


def test_a_head_that_nobody_asks_changes_no_step(tiny: Callable[..., Path]) -> None:
    """The launches of a step, and the text, are those of a checkpoint without one."""
    shape = replace(SHAPES["moe"], layers=4)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16", mtp=True), **EXACT)
    cpu = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), "cpu", **BACKENDS["cpu"])
    prompt = ids_of(shape.vocab, 70)
    texts = [continued(m, m.new_sequence(), prompt, 40, shape.vocab) for m in (model, cpu)]
    assert texts[0] == texts[1]
    sequence, before = model.new_sequence(), model.counts["launches"]
    model.forward(sequence, ids(1))
    assert model.counts["launches"] - before == 3 * 6 + 8 + 2


def test_heads_have_pages_of_their_own(sim: Any, tiny: Callable[..., Path]) -> None:
    """Two conversations, each with a head, over the end of a page, checked; three schedules."""
    shape = replace(SHAPES["moe"], layers=4)
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16", mtp=True)
    model = load(folder, ablate=("matrix_prefill",))
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        pairs = [(model.new_sequence(), model.new_head_sequence()) for _ in range(2)]
        logits = []
        for (sequence, head), length in zip(pairs, (63, 5), strict=True):
            text = ids_of(shape.vocab, length, seed=length)
            model.draft(sequence, head, text, text)
        for token in (3, 4):
            logits += [model.draft(sequence, head, ids(token), ids(9)).tobytes() for sequence, head in pairs]
        sampler = sampler_of(shape.vocab)
        tokens = [model.step(pairs[0][0], 5, sampler), model.step(pairs[1][0], 6, sampler)]
        results.append((logits, tokens))
    assert sim.diagnostics() == []
    assert results[0] == results[1] == results[2]


def test_a_model_without_a_head_says_so(metal_lily: ModuleType, tiny: Callable[..., Path]) -> None:
    model = load(tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16"))
    sequence, head = model.new_sequence(), model.new_sequence()
    with pytest.raises(metal_lily.InvalidArgumentError, match="no multi-token prediction head"):
        model.draft(sequence, head, ids(1), ids(2))
