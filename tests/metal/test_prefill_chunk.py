"""Whole chunks through the kernels of many rows: the model's logits, equal bits by chunk, launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.shapes import SHAPES
from prefill_model import PrefillModel
from prefill_reference import PATHS, SIMDGROUP, MatrixPath

FILES = (
    "attention",
    "attention_prefill",
    "delta_rule",
    "delta_rule_scan",
    "experts",
    "head",
    "matrix_simdgroup",
    "project",
    "routing",
)
PROMPT = np.random.default_rng(3).integers(0, 300, 100)


def model(sim: Any, kernels: Any, folder: Path, path: MatrixPath = SIMDGROUP) -> PrefillModel:
    libraries = {name: kernels(name, "float") for name in FILES}
    libraries["matrix"] = path.library(kernels, "float")
    built = PrefillModel(sim, libraries, folder)
    built.path = path
    return built


@pytest.mark.parametrize(
    ("name", "rows", "form"),
    [
        ("moe", 9, "scan"),
        ("moe", 65, "scan"),
        ("moe", 65, "blocks"),
        ("gdn_ratio4", 33, "scan"),
        ("gdn_ratio4", 33, "blocks"),
        ("top3", 17, "scan"),
        ("kv_ratio8", 40, "scan"),
        ("head256", 70, "scan"),
    ],
)
def test_logits_are_those_of_the_model(
    sim: Any, kernels: Any, tiny: Any, name: str, rows: int, form: str
) -> None:
    """A chunk, its last rows' logits, a second chunk, and decode steps behind them."""
    folder = tiny(replace(SHAPES[name], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    metal = model(sim, kernels, folder)
    metal.form = form
    found = [metal.chunk(PROMPT[:rows], [0, rows // 2, rows - 1]), metal.chunk(PROMPT[rows : rows + 10], [9])]
    found.append(metal.step(PROMPT[rows + 10 : rows + 12], 2))
    wanted = metal.model.forward(PROMPT[: rows + 12]).logits
    places = [0, rows // 2, rows - 1, rows + 9, rows + 10, rows + 11]
    np.testing.assert_allclose(np.concatenate(found), wanted[places], atol=1e-4)


def test_the_paths_of_matrix_products_agree(sim: Any, kernels: Any, tiny: Any) -> None:
    """Each forced; logits within 2e-5 of each other and 1e-4 of the model."""
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    found = {}
    for name, path in PATHS.items():
        metal = model(sim, kernels, folder, path)
        found[name] = metal.chunk(PROMPT[:37], [0, 18, 36])
    wanted = metal.model.forward(PROMPT[:37]).logits[[0, 18, 36]]
    for logits in found.values():
        np.testing.assert_allclose(logits, wanted, atol=1e-4)
        np.testing.assert_allclose(logits, found["simdgroup"], atol=2e-5)


def test_chunks_of_any_size_have_the_same_bits(sim: Any, kernels: Any, tiny: Any) -> None:
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    results = []
    for sizes in ([90], [9, 81], [50, 40], [30, 30, 30]):
        metal, at = model(sim, kernels, folder), 0
        for size in sizes:
            logits = metal.chunk(PROMPT[at : at + size], [size - 1])
            at += size
        state = next(layer["state"] for layer in metal.layers if "state" in layer)
        results.append(logits.tobytes() + state.array(np.uint8).tobytes())
    assert len(set(results)) == 1


def test_the_schedule_of_the_gpu_does_not_show(sim: Any, kernels: Any, tiny: Any) -> None:
    folder = tiny(replace(SHAPES["moe"], layers=4), "mlx-4bit-g64", dtype="bfloat16")
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        results.append(model(sim, kernels, folder).chunk(PROMPT[:20], [19]).tobytes())
    assert len(set(results)) == 1


def test_a_chunk_of_forty_layers_takes_551_launches(sim: Any, kernels: Any, tiny: Any) -> None:
    shape = replace(SHAPES["moe"], layers=40, experts=4)
    metal = model(sim, kernels, tiny(shape, "mlx-4bit-g64", dtype="bfloat16"))
    sim.reset_counters()
    metal.chunk(PROMPT[:9], [])
    assert sim.counters()["dispatches"] == 30 * 14 + 10 * 13 + 1 == 551
    metal.chunk(PROMPT[9:18], [8])
    assert sim.counters()["dispatches"] == 551 + 553
