"""Host programs on metal-cpp run against the simulator; their own checks print `ok` or `FAIL` lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from metalsim_helpers import KERNELS

HostProgram = Callable[[str], Path]


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {k: v for k, v in os.environ.items() if not k.startswith("METALSIM_") or k == "METALSIM_BUILD"}
    command = [str(program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**settings, **environment}, timeout=120
    )


def assert_all_ok(result: subprocess.CompletedProcess[str], checks: int) -> None:
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == [], result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    assert len(lines) == checks, result.stdout


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_concurrent_dispatches(host_program: HostProgram, seed: str) -> None:
    program = host_program("concurrent_sort")
    assert_all_ok(run(program, str(KERNELS / "sort.metal"), METALSIM_SEED=seed), 11)


def test_fences_events_handlers_and_memory(host_program: HostProgram) -> None:
    assert_all_ok(run(host_program("ordering")), 26)


def test_fault_injection(host_program: HostProgram) -> None:
    assert_all_ok(run(host_program("faults")), 15)


def test_fault_injection_by_environment(host_program: HostProgram) -> None:
    program = host_program("concurrent_sort")
    result = run(program, str(KERNELS / "sort.metal"), METALSIM_FAULT="library:1")
    assert "injected fault: the library does not compile" in result.stderr
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-pool", "autoreleased without a pool"),
        ("over-release", "to a released MTLBuffer"),
        ("use-after-release", "message 'contents' sent to a released MTLBuffer"),
        ("commit-without-end", "missing endEncoding"),
        ("dropped-encoder", "released without endEncoding"),
        ("unimplemented", "-[MTLDevice newHeapWithDescriptor:] is not implemented"),
        ("long-bytes", "setBytes longer than 4096 bytes"),
        ("no-pipeline", "dispatch without a pipeline state"),
        ("two-encoders", "another encoder of this command buffer is still open"),
        ("wait-before-commit", "was not committed"),
        ("late-handler", "addCompletedHandler after commit"),
        ("binding-index", "binding index 31 is above 30"),
        ("threadgroup-length", "is not a multiple of 16"),
    ],
)
def test_misuse_ends_with_a_message(host_program: HostProgram, name: str, message: str) -> None:
    result = run(host_program("misuse"), name)
    assert result.returncode < 0, result.stdout
    assert message in result.stderr
