"""The pinned compiler and the metal-cpp headers, both from the Python package index.

`ziglang` carries clang 22, libc++ and the macOS system headers in one wheel; `mlx-metal` carries Apple's
metal-cpp headers (only they are taken: nothing of MLX is linked or loaded). Both are unpacked under the
build directory, so that no Python environment is changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

from .paths import build_directory

ZIG_VERSION = "0.17.1"
METAL_CPP_WHEEL = "mlx-metal==0.32.4"


class ToolchainError(RuntimeError):
    """The compiler or the headers can't be had; the text says which and why."""


def _download(requirement: str, folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
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


def _unpack(wheel: Path, target: Path, prefix: str) -> None:
    """Extract the wheel's files under `prefix`, complete or not at all."""
    partial = target.with_name(target.name + f".{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix):
                archive.extract(name, partial)
    if not partial.exists():
        raise ToolchainError(f"{wheel.name} holds no {prefix}")
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial, ignore_errors=True)
    wheel.unlink(missing_ok=True)


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
        wheel = _download(f"ziglang=={ZIG_VERSION}", build_directory() / "wheels")
        _unpack(wheel, target, "ziglang/")
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
        platform = ["--platform", "macosx_15_0_arm64", "--python-version", "3.12"]
        wheel = _download(METAL_CPP_WHEEL, build_directory() / "wheels", *platform)
        _unpack(wheel, target, "mlx/include/metal_cpp/")
    return headers


def set_up() -> tuple[Path, Path]:
    """Fetch what is missing; returns the compiler and the header directory."""
    return zig(), metal_cpp()
