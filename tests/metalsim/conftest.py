"""Fixtures for metalsim's tests: the compiler, the simulator, and host programs built against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from metalsim_helpers import HOST  # first: makes the metalsim package importable

from metalsim import build, toolchain  # isort: skip
from metalsim.simulator import SEEDS, Simulator  # isort: skip


@pytest.fixture(scope="session")
def compiler() -> Path:
    """The pinned compiler and the metal-cpp headers; the tests that need them are skipped without."""
    try:
        return toolchain.set_up()[0]
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def loaded_simulator(compiler: Path) -> Simulator:
    return Simulator()


@pytest.fixture
def sim(loaded_simulator: Simulator) -> Iterator[Simulator]:
    """The simulator in its initial state."""

    def reset() -> None:
        loaded_simulator.configure(seed=0, checks=True)
        loaded_simulator.limit_threads()
        loaded_simulator.clear_diagnostics()
        loaded_simulator.clear_faults()
        loaded_simulator.log_dispatches(False)
        loaded_simulator.reset_counters()

    reset()
    yield loaded_simulator
    reset()


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def seeded(sim: Simulator, request: pytest.FixtureRequest) -> Simulator:
    """The simulator once per scheduling seed."""
    sim.configure(seed=request.param)
    return sim


@pytest.fixture(scope="session")
def host_program(compiler: Path) -> Callable[[str], Path]:
    """Builds tests/metalsim/host/<name>.cpp against metal-cpp and libmetalsim."""
    return lambda name: build.build_program([HOST / f"{name}.cpp", HOST / "metal_impl.cpp"], name)
