"""Drafts aren't verified on the GPU, and it says so instead of doing something else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load, sampler_of
from oracles.shapes import SHAPES

VOCABULARY = SHAPES["moe"].vocab


@pytest.fixture
def folder(tiny: Any) -> Path:
    path = tiny("moe", "mlx-4bit-g64", dtype="bfloat16")
    assert isinstance(path, Path)
    return path


def test_an_engine_that_should_speculate_names_the_backend(metal_lily: ModuleType, folder: Path) -> None:
    with pytest.raises(metal_lily.BackendError, match="works on the CPU backend only, not on 'metal'"):
        metal_lily.Engine.load(folder, backend="metal", speculation="prompt_lookup")
    with metal_lily.Engine.load(folder, backend="cpu", threads=1, speculation="prompt_lookup") as engine:
        assert engine.generate(list(range(40, 50)), max_tokens=2).usage.completion_tokens == 2


def test_drafts_are_refused_and_the_sequence_goes_on(metal_lily: ModuleType, folder: Path) -> None:
    model = load(folder)
    assert not model.can_verify
    tried, plain = model.new_sequence(), model.new_sequence()
    prompt = ids_of(VOCABULARY, 5)
    for sequence in (tried, plain):
        model.forward(sequence, prompt)
    with pytest.raises(metal_lily.BackendError, match="can't be verified on this backend: metal"):
        model.step(tried, 3, sampler_of(VOCABULARY), [4, 5])
    assert tried.tokens == prompt.tolist()
    more = np.array([7], np.int32)
    np.testing.assert_array_equal(model.forward(tried, more), model.forward(plain, more))
