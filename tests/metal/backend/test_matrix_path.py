"""Prompts by each unit that multiplies matrices: the choice, the test before it is used, equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load
from oracles.shapes import SHAPES

NAME = "moe"
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
