"""Engines shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import EXACT, Tiny, load

import lily_py


@pytest.fixture(scope="session")
def folder(tiny: Tiny) -> Path:
    """A tiny mixture of experts in 4 bits."""
    return tiny("moe_tied", "mlx-4bit-g64")


@pytest.fixture(scope="session")
def _shared(folder: Path) -> Iterator[lily_py.Engine]:
    with load(folder) as engine:
        yield engine


@pytest.fixture
def engine(_shared: lily_py.Engine) -> lily_py.Engine:
    """An engine on `folder` with nothing in its store of states."""
    _shared._runtime.store.clear()
    return _shared


@pytest.fixture(scope="session")
def exact(folder: Path) -> Iterator[lily_py.Engine]:
    """An engine on `folder` without deliberate rounding, for comparison with oracles."""
    with load(folder, **EXACT) as engine:
        yield engine
