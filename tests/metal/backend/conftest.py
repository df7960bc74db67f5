"""Fixtures for tests of the Metal backend: programs on its device layer, and lily itself on the simulator."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from metal_reference import ROOT  # first: makes the metalsim package importable

from metalsim import build, extension  # isort: skip
from metalsim.simulator import Simulator  # isort: skip

HOST = Path(__file__).resolve().parent / "host"
DEVICE = ("device", "kernel_library", "submission", "command", "metal_cpp")


@pytest.fixture(scope="session")
def device_program(compiler: Path) -> Callable[[str], Path]:
    """Builds host/<name>.cpp with the device layer, against metal-cpp and libmetalsim."""
    folder = extension.CSRC / "backend" / "metal"
    options = [*extension.FLAGS, *(f"-D{define}" for define in extension.DEFINES)]
    options += ["-I", str(HOST), "-I", str(ROOT / "tests" / "metalsim" / "host")]
    return lambda name: build.build_program(
        [HOST / f"{name}.cpp", *(folder / f"{part}.cpp" for part in DEVICE)], name, options
    )


@pytest.fixture(scope="session")
def metal_lily(compiler: Path) -> ModuleType:
    """The package `lily` with the Metal backend on the simulator, in place of the one imported before.

    Its exceptions are its own: `metal_lily.BackendError`. Ask for the fixture `sim` beside it to read and set
    the simulator's diagnostics, counters, faults and seeds.
    """
    package = extension.build_package()
    for name in [name for name in sys.modules if name.split(".")[0] in ("lily", "lily_py")]:
        del sys.modules[name]
    sys.path.insert(0, str(package))
    module = importlib.import_module("lily")
    assert Path(module.__file__ or "").is_relative_to(package)
    return module


@pytest.fixture
def fast(metal_lily: ModuleType, loaded_simulator: Simulator) -> None:
    """Kernels without the checker, but for tests that switch it on."""
    loaded_simulator.configure(checks=False)
