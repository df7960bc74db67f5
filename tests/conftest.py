"""Fixtures every test may use: tiny checkpoints, a seeded generator, and the oracle marker's condition."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The reference's products are too small to share: two threads make them ten times slower on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from oracles import checkpoints
from oracles.shapes import SHAPES, Shape

TinyCheckpoint = Callable[..., Path]


def pytest_configure() -> None:
    # A shell's background jobs inherit an ignored Ctrl-C, and so would the programs that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        skip = pytest.mark.skip(reason=f"needs {' and '.join(missing)}: run `make test-oracles`")
        for item in items:
            if "oracle" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """`tiny("moe", "mlx-4bit-g64", **options)` is the folder of a tiny checkpoint, built once per session.

    Options are those of `oracles.checkpoints.build`. Tests must not change the folder: copy it first.
    """
    built: dict[str, Path] = {}

    def get(shape: Shape | str, fmt: str = "mlx", **options: Any) -> Path:
        shape = SHAPES[shape] if isinstance(shape, str) else shape
        key = repr((shape, fmt, sorted(options.items())))
        if key not in built:
            built[key] = checkpoints.build(tmp_path_factory.mktemp("tiny"), shape, fmt, **options)
        return built[key]

    return get


@pytest.fixture
def rng() -> np.random.Generator:
    """A random generator with the same seed in every test."""
    return np.random.default_rng(20_260_501)
