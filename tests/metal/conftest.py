"""Fixtures of the kernel tests: the simulator, and compiled kernel files by name and activation type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from metal_reference import METAL, language  # first: makes the metalsim package importable

from metalsim.fixtures import compiler, loaded_simulator, pytest_runtest_makereport, sim  # isort: skip
from metalsim.simulator import Library, Simulator  # isort: skip

__all__ = ["compiler", "kernels", "loaded_simulator", "pytest_runtest_makereport", "sim"]

KernelFile = Callable[..., Library]


@pytest.fixture(scope="session")
def kernels(loaded_simulator: Simulator) -> KernelFile:
    """`kernels("project", "float", "LILY_FORMAT=b6")` is metal/project.metal built so, checked."""
    built: dict[tuple[str, ...], Library] = {}

    def get(name: str, activation: str = "bfloat", *define: str) -> Library:
        key = (name, activation, *define)
        if key not in built:
            built[key] = loaded_simulator.compile(
                METAL / f"{name}.metal",
                define=[f"LILY_ACTIVATION={activation}", *define],
                include=[METAL],
                language=language(name),
            )
        return built[key]

    return get
