"""pytest fixtures for tests that use the simulator, and a hook; import them in a conftest.py.

from metalsim.fixtures import compiler, loaded_simulator, pytest_runtest_makereport, seeded, sim  # noqa: F401
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from . import toolchain
from .simulator import SEEDS, Simulator


class Missing(pytest.skip.Exception):
    """Skips a test for want of the compiler or of a machine that it works on."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give tests that are skipped for one reason one place, so that the summary says it once."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, Missing):
        report.longrepr = (__file__, 0, f"Skipped: {call.excinfo.value}")
    return report


@pytest.fixture(scope="session")
def compiler() -> Path:
    """The pinned compiler, with the metal-cpp headers in place; tests that need them are skipped without."""
    try:
        toolchain.require_platform()
        return toolchain.set_up()[0]
    except toolchain.ToolchainError as error:
        raise Missing(str(error)) from error


@pytest.fixture(scope="session")
def loaded_simulator(compiler: Path) -> Simulator:
    """The simulator, built and loaded."""
    return Simulator()


def reset(simulator: Simulator) -> None:
    """Put everything that tests change back to its initial state."""
    simulator.configure(seed=0, checks=True, working_set=16 << 30, max_buffer=16 << 30, macos=(15, 0))
    simulator.configure(gpu=("applegpu_g13g", 7), wait_timeout=10)
    simulator.limit_threads()
    simulator.clear_diagnostics()
    simulator.clear_faults()
    simulator.log_dispatches(False)
    simulator.reset_counters()


@pytest.fixture
def sim(loaded_simulator: Simulator) -> Iterator[Simulator]:
    """The simulator in its initial state, checked, with natural scheduling."""
    reset(loaded_simulator)
    yield loaded_simulator
    reset(loaded_simulator)


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def seeded(sim: Simulator, request: pytest.FixtureRequest) -> Simulator:
    """The simulator once per scheduling seed."""
    sim.configure(seed=request.param)
    return sim
