"""lily's wheel for Apple Silicon, made on Linux: the real extension with the Metal backend, cross-built.

scikit-build-core packs the Python part with its metadata; the extension and the kernels are put in, and the
wheel gets the tag of the extension.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .. import extension
from ..objects import CompileError
from ..paths import REPOSITORY, build_directory
from . import cross_build, macho

TARGET = "14.0"
STABLE_ABI = "3.10"
TAG = {"python": "cp310", "abi": "abi3", "platform": "macosx_14_0_arm64"}
NAME = "_core.abi3.so"
CPU_KERNELS = ("generic", "neon")  # dot products are part of every Apple Silicon


def build_extension() -> tuple[Path, cross_build.Report]:
    """The extension as a Mac would build it, checked. Raises CompileError or CrossBuildError."""
    output = build_directory() / "macos" / NAME
    choice = extension.CSRC / "backend" / "cpu" / "kernels.cpp"
    options = cross_build.Options(
        sources=[source for source in extension.sources() if source != choice],
        output=output,
        target=TARGET,
        include=[extension.CSRC],
        define=extension.DEFINES,
        nanobind_folder=cross_build.nanobind_folder(),
        stable_abi=STABLE_ABI,
        backend_module="nanobind_backend",
        warnings_as_errors=True,
        parts=[
            cross_build.Part([choice], ["-DLILY_NEON_KERNELS"]),
            *(
                cross_build.Part(extension.cpu_kernels(), extension.kernel_flags(name))
                for name in CPU_KERNELS
            ),
        ],
    )
    return output, cross_build.cross_build(options)


def _run(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if result.returncode != 0:
        raise cross_build.CrossBuildError(f"{command[0]}: {(result.stderr or result.stdout).strip()}")


def _python_part(folder: Path) -> Path:
    """A wheel of the package without an extension."""
    settings = ["-C", "wheel.cmake=false", "-C", "wheel.platlib=true"]
    _run("pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *settings, str(REPOSITORY))
    return next(folder.glob("*.whl"))


def build_wheel(output: Path) -> Path:
    """Write the wheel into `output`; returns its path. Needs the package wheel, and an index for build tools.

    Raises CompileError or CrossBuildError.
    """
    compiled, _ = build_extension()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lily-wheel-") as name:
        work = Path(name)
        _run("wheel", "unpack", "--dest", str(work / "tree"), str(_python_part(work)))
        tree = next((work / "tree").iterdir())
        for stale in (tree / "lily_py").glob("_core*.so"):
            stale.unlink()
        shutil.copy(compiled, tree / "lily_py" / NAME)
        shutil.copytree(extension.METAL, tree / "lily_py" / "metal", dirs_exist_ok=True)
        packed = work / "packed"
        packed.mkdir()
        _run("wheel", "pack", "--dest-dir", str(packed), str(tree))
        tags = [f"--{part}-tag={tag}" for part, tag in TAG.items()]
        _run("wheel", "tags", "--remove", *tags, *map(str, packed.glob("*.whl")))
        wheel = next(packed.glob("*.whl"))
        return Path(shutil.move(wheel, output / wheel.name))


def run_command(arguments: argparse.Namespace) -> int:
    """The `wheel-macos` command; returns the exit code."""
    try:
        print(build_wheel(arguments.output))
    except (CompileError, cross_build.CrossBuildError, macho.MachOError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
