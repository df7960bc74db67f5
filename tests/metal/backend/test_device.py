"""The device layer, by host programs on the simulator; their checks print `ok` or `FAIL` lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

DeviceProgram = Callable[[str], Path]


def outcome(program: Path, **environment: str) -> list[str]:
    """Lines of a program that ended well."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("METALSIM_") or k == "METALSIM_BUILD"}
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**settings, **environment}, timeout=300
    )
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == [], result.stdout + result.stderr
    assert result.returncode == 0, result.stdout + result.stderr
    return lines


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_order_of_launches_passes_and_command_buffers(device_program: DeviceProgram, seed: str) -> None:
    assert len(outcome(device_program("device_order"), METALSIM_SEED=seed)) == 49


def test_memory_budget_devices_and_threads(device_program: DeviceProgram) -> None:
    assert len(outcome(device_program("device_memory"))) == 38


def test_faults(device_program: DeviceProgram) -> None:
    assert len(outcome(device_program("device_faults"))) == 41
