"""Prompts by each unit that multiplies matrices: the choice, the test before it is used, equal results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load
from metal_reference import ROOT
from oracles.shapes import SHAPES

NAME = "moe"
WIDE = replace(SHAPES["moe"], layers=2, interval=2, head_dim=128)
ROWS = (9, 16, 17, 33, 70)
TENSOR = ("applegpu_g17s", 10)


@pytest.fixture
def machine(metal_lily: ModuleType, sim: Any) -> Callable[[tuple[str, int], tuple[int, int]], None]:
    def configure(gpu: tuple[str, int], macos: tuple[int, int]) -> None:
        sim.configure(checks=False, gpu=gpu, macos=macos)

    return configure


def logits(model: Any, rows: int) -> Any:
    return model.forward(model.new_sequence(), ids_of(SHAPES[NAME].vocab, rows, seed=rows))


@pytest.mark.parametrize(
    ("gpu", "macos", "ablate", "path"),
    [
        (("applegpu_g13g", 7), (26, 2), (), "simdgroup matrices"),
        (("applegpu_g16s", 9), (26, 2), (), "simdgroup matrices"),
        (TENSOR, (15, 0), (), "simdgroup matrices"),
        (TENSOR, (26, 0), (), "simdgroup matrices"),
        (TENSOR, (26, 1), (), "tensor tiles"),
        (TENSOR, (26, 2), (), "tensor fragments"),
        (TENSOR, (26, 2), ("tensor_fragments",), "tensor tiles"),
        (TENSOR, (26, 2), ("tensor_operations",), "simdgroup matrices"),
        (TENSOR, (26, 2), ("bf16_activations",), "simdgroup matrices"),
    ],
)
def test_gpu_and_system_decide_the_path(
    machine: Any, tiny: Any, gpu: Any, macos: Any, ablate: Any, path: str
) -> None:
    machine(gpu, macos)
    assert f"prompts by {path})" in load(tiny(NAME, "mlx-4bit-g64"), ablate=ablate).backend


@pytest.mark.parametrize("ablate", [(), ("tensor_fragments",)])
def test_tensor_paths_give_the_logits_of_simdgroup_matrices(
    machine: Any, tiny: Callable[[str, str], Path], sim: Any, ablate: tuple[str, ...]
) -> None:
    machine(TENSOR, (26, 2))
    folder = tiny(NAME, "mlx-4bit-g64")
    plain, tensor = load(folder, ablate=("tensor_operations",)), load(folder, ablate=ablate)
    for rows in ROWS:
        expected = logits(plain, rows)
        sim.log_dispatches()
        got = logits(tensor, rows)
        products = [d for d in sim.dispatches() if d.kernel.startswith("project_rows")]
        assert {d.threads[0] for d in products} == {64 if rows <= 16 else 128}
        assert all(int(d.kernel.rsplit("_t", 1)[1]) >= 16 for d in products)
        np.testing.assert_allclose(got, expected, atol=0.03 * np.abs(expected).max())


def test_tensor_kernels_that_do_not_compile_leave_simdgroup_matrices(
    machine: Any, tiny: Callable[[str, str], Path], sim: Any
) -> None:
    machine(TENSOR, (26, 2))
    folder = tiny(NAME, "mlx-4bit-g64")
    expected = logits(load(folder, ablate=("tensor_operations",)), 20)
    sim.limit_threads(64, "project_rows_b4_t64")
    model = load(folder)
    sim.limit_threads(1024, "project_rows_b4_t64")
    assert "prompts by simdgroup matrices; tensor operations failed their test" in model.backend
    np.testing.assert_array_equal(logits(model, 20), expected)


def test_attention_that_does_not_compile_leaves_that_of_simdgroup_matrices(
    machine: Any, tiny: Callable[..., Path], sim: Any
) -> None:
    """Products go on by tensor fragments: of the pipelines made at load the eighth is tensor attention."""
    machine(TENSOR, (26, 2))
    folder = tiny(WIDE, "mlx-4bit-g64", dtype="bfloat16")
    whole = load(folder)
    assert "prompts by tensor fragments)" in whole.backend
    sim.inject("pipeline", nth=8)
    model = load(folder)
    assert "prompts by tensor fragments; attention without them: " in model.backend
    sim.log_dispatches()
    found, wanted = (m.forward(m.new_sequence(), ids_of(WIDE.vocab, 40)) for m in (model, whole))
    assert sum(d.kernel.startswith("attend_rows") for d in sim.dispatches()) == 2
    np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())


WRONG = """#!/bin/sh
sed -i 's/score\\[at\\] \\*= scale;/score[at] *= scale * 1.25f;/' "$4"
exec {python} "$@"
"""
DESCRIBE = """
import sys
sys.path[:0] = sys.argv[2:]
from metalsim.simulator import Simulator
from lily_py.checkpoint import open_checkpoint
from lily_py.loader import load_model
Simulator().configure(checks=False, gpu=("applegpu_g17s", 10), macos=(26, 2))
print(load_model(open_checkpoint(sys.argv[1]), backend="metal").backend)
"""


def test_attention_with_wrong_numbers_leaves_that_of_simdgroup_matrices(
    metal_lily: ModuleType, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A compiler that gets attention_tensor.metal wrong, in a process of its own."""
    folder = tiny(WIDE, "mlx-4bit-g64", dtype="bfloat16")
    compiler = tmp_path / "python"
    compiler.write_text(WRONG.format(python=sys.executable))
    compiler.chmod(0o755)
    package, tools = Path(metal_lily.__file__ or "").parent.parent, ROOT / "tools"
    backends = [
        subprocess.run(
            [sys.executable, "-c", DESCRIBE, str(folder), str(package), str(tools)],
            env=os.environ | extra, capture_output=True, text=True, check=True,
        ).stdout
        for extra in ({}, {"METALSIM_PYTHON": str(compiler)})
    ]  # fmt: skip
    assert "prompts by tensor fragments)" in backends[0]
    assert "prompts by tensor fragments; attention without them: attention is " in backends[1]
    assert "where simdgroup matrices give" in backends[1]
