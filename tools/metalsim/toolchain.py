"""The pinned compiler and the metal-cpp headers, both from the Python package index.

`ziglang` carries clang 22, libc++ and the macOS system headers in one wheel; `mlx-metal` carries Apple's
metal-cpp headers (only they are taken: nothing of MLX is linked or loaded). Both are unpacked under the
build directory, so that no Python environment is changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .objects import locked
from .paths import build_directory

ZIG_VERSION = "0.17.1"
METAL_CPP_WHEEL = "mlx-metal==0.32.4"
_PLATFORMS = (("Linux", "x86_64"), ("Linux", "amd64"))


class ToolchainError(RuntimeError):
    """The compiler or the headers can't be had; the text says which and why."""


def require_platform() -> None:
    """Raise ToolchainError where simulated kernels can't run."""
    here = (platform.system(), platform.machine())
    if here not in _PLATFORMS:
        raise ToolchainError(
            f"metalsim runs Metal kernels on 64-bit x86 Linux; this machine is {' '.join(here)}. "
            "Its tests and those of the Metal backend need such a machine, a container or a virtual one."
        )


def _download(requirement: str, folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "-d", str(folder), *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob(requirement.split("==")[0].replace("-", "_") + "-*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ToolchainError(
            f"cannot get {requirement} from the package index: {reason}. "
            "Connect to an index that has it, or set METALSIM_ZIG and METALSIM_METAL_CPP to existing copies."
        )
    return wheels[-1]


def _fetch(requirement: str, prefix: str, target: Path, *options: str) -> None:
    """Unpack the files of a wheel under `prefix` into `target`, complete or not at all, unless done."""
    with locked(target.with_name(target.name + ".lock")):
        if target.exists():
            return
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
            wheel = _download(requirement, Path(folder), *options)
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [n for n in archive.namelist() if n.startswith(prefix)])
            if not unpacked.exists():
                raise ToolchainError(f"{wheel.name} holds no {prefix}")
            unpacked.rename(target)


def zig() -> Path:
    """The zig executable: `METALSIM_ZIG`, the pinned package if installed, else an unpacked wheel."""
    named = os.environ.get("METALSIM_ZIG")
    if named:
        if not Path(named).is_file():
            raise ToolchainError(f"METALSIM_ZIG names {named}, which is not a file")
        return Path(named)
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parent / "zig"
        version = subprocess.run([str(installed), "version"], capture_output=True, text=True).stdout.strip()
        if version == ZIG_VERSION:
            return installed
    target = build_directory() / f"ziglang-{ZIG_VERSION}"
    executable = target / "ziglang" / "zig"
    if not executable.exists():
        _fetch(f"ziglang=={ZIG_VERSION}", "ziglang/", target)
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return executable


def metal_cpp() -> Path:
    """Directory with Foundation/ and Metal/: `METALSIM_METAL_CPP`, of an installed mlx-metal, or unpacked."""
    named = os.environ.get("METALSIM_METAL_CPP")
    if named:
        if not (Path(named) / "Metal" / "Metal.hpp").is_file():
            raise ToolchainError(f"METALSIM_METAL_CPP names {named}, which has no Metal/Metal.hpp")
        return Path(named)
    inside = Path("mlx", "include", "metal_cpp")
    for folder in map(Path, sys.path):
        if (folder / inside / "Metal" / "Metal.hpp").exists():
            return folder / inside
    target = build_directory() / "metal-cpp"
    headers = target / inside
    if not (headers / "Metal" / "Metal.hpp").exists():
        of_a_mac = ["--platform", "macosx_15_0_arm64", "--python-version", "3.12"]
        _fetch(METAL_CPP_WHEEL, "mlx/include/metal_cpp/", target, *of_a_mac)
    return headers


def set_up() -> tuple[Path, Path]:
    """Fetch what is missing; returns the compiler and the header directory."""
    return zig(), metal_cpp()
