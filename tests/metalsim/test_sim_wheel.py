"""The wheel for Apple Silicon: lily's real extension, cross-built and checked, in an installable archive."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from metalsim.macos import cross_build, macho, selectors, wheel
from metalsim_helpers import HERE

METAL = HERE.parents[1] / "metal"


@pytest.fixture(scope="module")
def extension(compiler: Path) -> tuple[Path, cross_build.Report]:
    pytest.importorskip("nanobind")
    return wheel.build_extension()


def test_extension_is_for_every_python_on_macos_14(extension: tuple[Path, cross_build.Report]) -> None:
    binary = extension[1].binary
    assert (binary.file_type, binary.minimum_macos, binary.is_signed) == ("dylib", "14.0", True)
    assert "_PyInit__core" in binary.exported
    assert [name for name in binary.libraries if not name.startswith(("/usr/lib/", "/System/"))] == []
    left = {symbol.name for symbol in binary.undefined if symbol.library is None and not symbol.weak}
    assert {name for name in left if not name.startswith(("_Py", "__Py"))} == set()
    assert "_PyMem_Free" in left  # so the set above is that of a real module


def test_its_messages_exist_on_macos_14_or_are_guarded(extension: tuple[Path, cross_build.Report]) -> None:
    used, known = extension[1].selectors, selectors.known()
    assert selectors.check(used, "14.0") == []
    newer = {name for name in used if known[name].startswith("(")}
    assert newer == {
        "setMathMode:", "newResidencySetWithDescriptor:error:", "addAllocation:", "removeAllocation:",
        "requestResidency", "addResidencySet:",
    }  # fmt: skip  # all behind system_at_least(15), see tests/metal/backend: macOS 14 works without them


def test_the_kernels_are_inside(extension: tuple[Path, cross_build.Report]) -> None:
    data = extension[0].read_bytes()
    for path in METAL.glob("*.metal"):
        assert path.read_bytes().splitlines()[0] in data, path.name


def test_wheel_can_be_installed(
    extension: tuple[Path, cross_build.Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wheel")
    monkeypatch.setattr(wheel, "build_extension", lambda: extension)
    path = wheel.build_wheel(tmp_path / "dist")
    assert path.name.endswith("-cp310-abi3-macosx_14_0_arm64.whl")
    names = set(zipfile.ZipFile(path).namelist())
    assert {"lily/__init__.py", "lily_py/engine.py", "lily_py/demo/model.safetensors"} < names
    assert {f"lily_py/metal/{file.name}" for file in METAL.glob("*.metal")} < names
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    command += [str(tmp_path / "site"), "--only-binary=:all:", "--python-version", "3.12"]
    subprocess.run([*command, "--platform", "macosx_14_0_arm64", str(path)], check=True)
    installed = tmp_path / "site" / "lily_py" / wheel.NAME
    assert macho.read(installed).minimum_macos == "14.0"
    assert [file.name for file in installed.parent.glob("_core*.so")] == [wheel.NAME]
