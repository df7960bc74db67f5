"""Fixtures for metalsim's tests: the simulator's own, and host programs built against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from metalsim_helpers import HOST  # first: makes the metalsim package importable

from metalsim import build  # isort: skip
from metalsim.fixtures import compiler, loaded_simulator, pytest_runtest_makereport, seeded, sim  # isort: skip

__all__ = ["compiler", "host_program", "loaded_simulator", "pytest_runtest_makereport", "seeded", "sim"]


@pytest.fixture(scope="session")
def host_program(compiler: Path) -> Callable[[str], Path]:
    """Builds tests/metalsim/host/<name>.cpp against metal-cpp and libmetalsim."""
    return lambda name: build.build_program([HOST / f"{name}.cpp", HOST / "metal_impl.cpp"], name)
