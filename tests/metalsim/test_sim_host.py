"""Host programs on metal-cpp run against the simulator; their own checks print `ok` or `FAIL` lines."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from metalsim import build, paths
from metalsim_helpers import HERE, HOST, KERNELS

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


def test_python_extension_on_the_simulator(compiler: Path, tmp_path: Path) -> None:
    nanobind = pytest.importorskip("nanobind")
    output = paths.build_directory() / "extension" / f"tiny{sysconfig.get_config_var('EXT_SUFFIX')}"
    build.build_extension(
        [HERE / "macos" / "extension.cpp", HOST / "metal_impl.cpp"],
        output,
        nanobind=Path(nanobind.__file__).parent,
        python_include=Path(sysconfig.get_paths()["include"]),
    )
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import tiny
from metalsim.simulator import Simulator
source = "#include <metal_stdlib>\\nusing namespace metal;\\n"
source += "kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]])"
source += "{ a[i + SHIFT] = i; }"
sim = Simulator()
assert tiny.device_name() == "Simulated GPU"
assert tiny.run(source.replace("SHIFT", "0"), "k") == 63
assert sim.counters()["dispatches"] == 1 and sim.counters()["bytes_written"] == 256
expected = {"1": "out-of-bounds: write of 4 bytes at offset 256", "nope": "undeclared identifier"}
for shift, text in expected.items():
    try:
        tiny.run(source.replace("SHIFT", shift), "k")
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(shift)
assert [d.kind for d in sim.diagnostics()] == ["out-of-bounds"]
print("done", sim.live_objects("MTLCommandBuffer"))
"""
    )
    search = os.pathsep.join((str(output.parent), str(paths.HOME.parent)))
    settings = {**os.environ, "PYTHONPATH": search}
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=settings)
    assert result.stdout == "done 0\n", result.stdout + result.stderr


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
