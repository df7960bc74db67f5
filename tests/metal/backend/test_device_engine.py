"""Failures of the GPU, seen through the engine: the right exception, nothing left behind, work goes on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROMPT = list(range(40, 60))
LENGTH = 4


@pytest.fixture(scope="module")
def folder(tiny: Any) -> Path:
    path = tiny("moe", "mlx-4bit-g64", dtype="bfloat16")
    assert isinstance(path, Path)
    return path


@pytest.fixture
def fast(sim: Any) -> None:
    """Kernels without the checker, which other tests have."""
    sim.configure(checks=False)


@pytest.fixture
def clean(metal_lily: ModuleType, sim: Any, fast: None) -> Iterator[None]:
    """The test's engine leaves no objects of the GPU."""
    gc.collect()
    before = {name: sim.live_objects(name) for name in ("MTLBuffer", "MTLCommandQueue", "MTLCommandBuffer")}
    yield
    gc.collect()
    assert {name: sim.live_objects(name) for name in before} == before


def answer(engine: Any) -> list[int]:
    return list(engine.generate(PROMPT, max_tokens=LENGTH, temperature=0).token_ids)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("kind", "nth", "error", "text"),
    [
        ("buffer", 1, "MemoryBudgetError", "no memory for the buffer"),
        ("buffer", 5, "MemoryBudgetError", "no memory for the buffer"),
        ("library", 1, "BackendError", "injected fault: the library does not compile"),
        ("queue", 1, "BackendError", "no command queue"),
        ("fence", 1, "BackendError", "no fence"),
        ("residency", 1, "BackendError", "no residency set"),
    ],
)
def test_load_that_fails(
    metal_lily: ModuleType, sim: Any, folder: Path, kind: str, nth: int, error: str, text: str
) -> None:
    sim.inject(kind, nth=nth)
    with pytest.raises(getattr(metal_lily, error), match=text):
        metal_lily.Engine.load(folder, backend="metal")


@pytest.mark.usefixtures("clean")
def test_engine_goes_on_after_a_failed_step(metal_lily: ModuleType, sim: Any, folder: Path) -> None:
    with metal_lily.Engine.load(folder, backend="metal") as engine:
        expected = answer(engine)
        for kind, code, text in (
            ("command_buffer", 8, "ran out of memory"),
            ("timeout", 2, "longer than the system allows"),
        ):
            sim.inject(kind, code=code)
            with pytest.raises(metal_lily.BackendError, match=text):
                engine.generate([*PROMPT, code], max_tokens=LENGTH, temperature=0)
            assert answer(engine) == expected


@pytest.mark.usefixtures("clean")
def test_engine_says_when_the_gpu_is_lost(metal_lily: ModuleType, sim: Any, folder: Path) -> None:
    with metal_lily.Engine.load(folder, backend="metal") as engine:
        sim.inject("command_buffer", code=4)
        with pytest.raises(metal_lily.BackendError, match="takes no more work from this process"):
            answer(engine)
        with pytest.raises(metal_lily.BackendError, match="start the process again"):
            answer(engine)


@pytest.mark.usefixtures("clean")
def test_weights_beyond_the_working_set_are_refused(metal_lily: ModuleType, sim: Any, folder: Path) -> None:
    sim.configure(working_set=64 << 10)
    with pytest.raises(metal_lily.MemoryBudgetError, match="GPU memory"):
        metal_lily.Engine.load(folder, backend="metal")


@pytest.mark.usefixtures("fast")
def test_auto_takes_metal_where_it_works(
    metal_lily: ModuleType, sim: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with metal_lily.Engine.load(folder) as engine:
        assert engine.info().backend.startswith("metal")
    sim.configure(macos=(13, 6))
    with pytest.raises(metal_lily.BackendError, match="macOS 14"):
        metal_lily.Engine.load(folder, backend="metal")
    with caplog.at_level(logging.WARNING, "lily"), metal_lily.Engine.load(folder) as engine:
        assert engine.info().backend.startswith("cpu")
    assert "the metal backend can't be used here: Metal needs macOS 14" in caplog.text
