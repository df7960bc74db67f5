"""Prompts without one of their techniques: the same result, by other launches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load, prompt, state_bytes
from oracles.shapes import SHAPES

SHAPE = SHAPES["moe"]


pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny(SHAPE, "mlx-4bit-g64", dtype="bfloat16")


@pytest.mark.parametrize("name", ["compressed_weights", "fitted_tiles"])
@pytest.mark.parametrize("gpu", [("applegpu_g16s", 9), ("applegpu_g17s", 10)])
def test_the_bytes_are_the_same(sim: Any, folder: Path, name: str, gpu: Any) -> None:
    sim.configure(checks=False, gpu=gpu, macos=(26, 2))
    whole, less = prompt(load(folder), SHAPE), prompt(load(folder, ablate=(name,)), SHAPE)
    np.testing.assert_array_equal(less[0], whole[0])
    assert less[1] == whole[1]


def test_expanded_weights_are_written_and_read_before_each_product(folder: Path) -> None:
    """A launch more for each matrix: three in a mixer, four in a mixture with a shared expert."""
    whole, less = prompt(load(folder), SHAPE), prompt(load(folder, ablate=("compressed_weights",)), SHAPE)
    mixers = 2 * SHAPE.layers
    assert less[2]["launches"] - whole[2]["launches"] == mixers + 4 * SHAPE.layers
    assert less[2]["bytes written"] > 2 * whole[2]["bytes written"]
    assert less[2]["bytes read"] > 1.5 * whole[2]["bytes read"]
    assert less[2]["multiply-adds"] == whole[2]["multiply-adds"]


@pytest.mark.parametrize("name", ["moe", "top3", "top_all"])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_host_routes_as_the_gpu_does(
    tiny: Callable[..., Path], tmp_path: Path, name: str, normalised: bool
) -> None:
    """It waits in every layer: as many command buffers more, and three launches less."""
    folder = Path(
        shutil.copytree(tiny(name, "mlx-4bit-g64", dtype="bfloat16", arch="qwen3_next"), tmp_path / name)
    )
    config = folder / "config.json"
    text = config.read_text()
    assert '"norm_topk_prob": true' in text
    config.write_text(text.replace('"norm_topk_prob": true', f'"norm_topk_prob": {str(normalised).lower()}'))
    exact = {"kv_dtype": "float32"}
    whole = prompt(load(folder, ablate=("bf16_activations",), **exact), SHAPES[name])
    less = prompt(load(folder, ablate=("bf16_activations", "gpu_routing"), **exact), SHAPES[name])
    np.testing.assert_allclose(less[0], whole[0], atol=1e-5)
    layers = SHAPES[name].layers
    assert whole[2]["launches"] - less[2]["launches"] == 3 * layers
    assert less[2]["command buffers"] == whole[2]["command buffers"] + layers
    assert less[2]["bytes read"] < whole[2]["bytes read"]


def test_without_chunks_a_prompt_is_one_block(tiny: Callable[..., Path]) -> None:
    """Blocks have 2,048 rows."""
    folder = tiny(replace(SHAPE, layers=2, interval=2), "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(SHAPE.vocab, 2048 + 9)
    results = []
    for ablate in ((), ("chunked_prefill",)):
        model = load(folder, chunk=4096, ablate=ablate)
        sequence = model.new_sequence()
        logits = model.forward(sequence, ids)
        results.append((logits.tobytes(), state_bytes(sequence, 1, 1)))
        counts = model.counts
        assert counts["passes"] == 2 - len(ablate)
        results[-1] += (counts["launches"],)
    whole, less = results
    assert less[:2] == whole[:2]
    assert less[2] < 0.6 * whole[2]
