"""Whole tokens through the kernels, one pass per step: against the NumPy model, row by row, and counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal_draft import DraftHead
from metal_model import MetalModel
from oracles.reference import MtpHead
from oracles.shapes import SHAPES

FILES = ("attention", "delta_rule", "experts", "head", "project")
PROMPT = np.random.default_rng(3).integers(0, 300, 70)


def model(sim: Any, kernels: Any, folder: Path) -> MetalModel:
    return MetalModel(sim, {name: kernels(name, "float") for name in FILES}, folder)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("moe", (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 2)),  # over the end of a page
        ("gdn_ratio4", (8, 2)),
        ("top3", (3, 1)),
        ("kv_ratio8", (5, 4)),
        ("head256", (1, 7)),
    ],
)
def test_logits_are_those_of_the_model(
    sim: Any, kernels: Any, tiny: Any, name: str, steps: tuple[int, ...]
) -> None:
    """A prompt in steps of some rows, then tokens that the device chose."""
    layers = {"layers": 2, "interval": 2} if name == "moe" else {"layers": 4}
    folder = tiny(replace(SHAPES[name], **layers), "mlx-4bit-g64", dtype="bfloat16")
    metal = model(sim, kernels, folder)
    found, ids, at = [], list(PROMPT[: sum(steps)]), 0
    for rows in steps:
        found.append(metal.step(PROMPT[at : at + rows], rows))
        at += rows
    metal.tokens.array(np.uint32)[0] = metal.tokens.array(np.uint32)[steps[-1] - 1]
    for _ in range(3):
        ids.append(int(metal.tokens.array(np.uint32)[0]))
        assert ids[-1] == found[-1][-1].argmax()
        found.append(metal.step(None, 1))
    wanted = metal.model.forward(np.array(ids)).logits
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-4)


def test_a_draft_head_gives_the_logits_of_its_reference(sim: Any, kernels: Any, tiny: Any) -> None:
    """Rows that follow a prompt's hidden rows, then two drafts that go on from their own."""
    folder = tiny(replace(SHAPES["moe"], layers=2, interval=2), "mlx-4bit-g64", dtype="bfloat16", mtp=True)
    libraries = {name: kernels(name, "float") for name in (*FILES, "combine")}
    head = DraftHead(sim, libraries, folder)
    hidden = head.model.forward(PROMPT[:12]).hidden
    reference, found, wanted, at = MtpHead(head.model), [], [], 0
    for rows in (3, 8, 1):
        tokens = PROMPT[at + 1 : at + 1 + rows]
        found.append(head.draft(tokens, hidden[at : at + rows], rows))
        wanted.append(reference.step(tokens, hidden[at : at + rows]))
        at += rows
    for _ in range(2):
        token = wanted[-1].logits[-1:].argmax(1)
        assert head.tokens.array(np.uint32)[0] == token
        found.append(head.draft(token, None, 1))
        wanted.append(reference.step(token, wanted[-1].hidden[-1:]))
    np.testing.assert_allclose(
        np.concatenate(found), np.concatenate([result.logits for result in wanted]), atol=1e-4
    )


def test_rows_in_one_step_have_the_bits_of_one_row_at_a_time(sim: Any, kernels: Any, tiny: Any) -> None:
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    together, single = model(sim, kernels, folder), model(sim, kernels, folder)
    rows = np.concatenate([together.step(PROMPT[at : at + 7], 7) for at in (0, 7)])
    alone = np.concatenate([single.step(PROMPT[at : at + 1], 1) for at in range(14)])
    assert rows.tobytes() == alone.tobytes()


def test_the_schedule_of_the_gpu_does_not_show(sim: Any, kernels: Any, tiny: Any) -> None:
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        metal = model(sim, kernels, tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16"))
        results.append(metal.step(PROMPT[:3], 3).tobytes() + metal.step(PROMPT[3:4], 1).tobytes())
    assert len(set(results)) == 1


def test_a_token_of_forty_layers_takes_263_launches_in_as_many_stages(
    sim: Any, kernels: Any, tiny: Any
) -> None:
    shape = replace(SHAPES["moe"], layers=40, experts=4)
    metal = model(sim, kernels, tiny(shape, "mlx-4bit-g64", dtype="bfloat16"))
    sim.reset_counters()
    metal.step(PROMPT[:1], 1)
    counters = sim.counters()
    assert counters["dispatches"] == 30 * 6 + 10 * 8 + 3 == 263
    assert counters["stages"] == 263
