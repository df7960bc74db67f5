"""The compiler is fetched once whoever asks for it, and what is missing is said once and clearly."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from metalsim import toolchain
from metalsim_helpers import HERE


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without compiler, headers and index; returns its empty build folder."""
    monkeypatch.setenv("METALSIM_BUILD", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("METALSIM_ZIG", "METALSIM_METAL_CPP", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "ZIG_VERSION", "0.0.1")  # not the installed one
    monkeypatch.setattr(sys, "path", [])
    return tmp_path


def test_without_an_index_the_remedy_is_named(nothing: Path) -> None:
    with pytest.raises(toolchain.ToolchainError, match=r"cannot get ziglang==0\.0\.1 .*METALSIM_ZIG"):
        toolchain.zig()
    with pytest.raises(toolchain.ToolchainError, match=r"cannot get mlx-metal==.*METALSIM_METAL_CPP"):
        toolchain.metal_cpp()
    assert [path for path in nothing.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_other_machines_are_named(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(
        toolchain.ToolchainError, match=rf"64-bit x86 Linux; this machine is {system} {machine}"
    ):
        toolchain.require_platform()


def test_tests_are_skipped_with_the_one_reason(tmp_path: Path) -> None:
    """Without a compiler: no failure, no traceback, one line that says what is missing and how to get it."""
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("METALSIM_", "PYTEST_"))
    }
    settings |= {"METALSIM_BUILD": str(tmp_path), "METALSIM_ZIG": str(tmp_path / "zig"), "COLUMNS": "300"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        str(HERE / "test_sim_groups.py"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    reasons = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 1
    assert f"METALSIM_ZIG names {tmp_path}/zig, which is not a file" in reasons[0]
    assert "passed" not in result.stdout.splitlines()[-1]


def test_the_compiler_is_fetched_once_for_all(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def download(requirement: str, folder: Path, *options: str) -> Path:
        fetched.append(requirement)
        time.sleep(0.2)
        wheel = folder / "ziglang-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("ziglang/zig", "the compiler")
            archive.writestr("other/file", "")
        return wheel

    monkeypatch.setattr(toolchain, "_download", download)
    with ThreadPoolExecutor(4) as pool:
        found = {job.result() for job in [pool.submit(toolchain.zig) for _ in range(4)]}
    assert found == {nothing / "ziglang-0.0.1" / "ziglang" / "zig"}
    assert fetched == ["ziglang==0.0.1"]
    assert os.access(found.pop(), os.X_OK)
    assert not list(nothing.rglob("*.whl")) + list(nothing.rglob("other"))


def test_a_wheel_without_the_compiler_leaves_nothing(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path, *options: str) -> Path:
        wheel = folder / "ziglang-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other/file", "")
        return wheel

    monkeypatch.setattr(toolchain, "_download", download)
    with pytest.raises(toolchain.ToolchainError, match="holds no ziglang/"):
        toolchain.zig()
    assert [path for path in nothing.iterdir() if path.suffix != ".lock"] == []
