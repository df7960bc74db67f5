"""Compiles an extension for Apple Silicon with the pinned compiler, and checks the result.

zig ships the C and C++ library, the Objective-C and the dispatch headers of macOS; the two missing headers
are in `stubs`, the link stubs of the frameworks in `tbd`. Symbols of Python are left to the interpreter,
every other undefined symbol must belong to a library that the extension names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..objects import CompileError, compile_objects, run
from ..paths import MACOS, build_directory
from ..toolchain import metal_cpp, zig
from . import macho, selectors

_FRAMEWORKS = ("Metal", "Foundation", "CoreFoundation")
_ALLOWED_LIBRARIES = ("/usr/lib/libSystem", "/usr/lib/libobjc", "/System/Library/Frameworks/")


class CrossBuildError(RuntimeError):
    """The result breaks a rule; the text says which."""


@dataclass
class Part:
    """Sources with flags of their own beside those of the extension."""

    sources: Sequence[Path]
    flags: Sequence[str]


@dataclass
class Options:
    """What to build. Paths of Python and nanobind are used only with `nanobind_folder` set.

    `backend_module` names the Python module that holds nanobind's compiled half; without one it is built in.
    """

    sources: Sequence[Path]
    output: Path
    target: str = "14.0"
    include: Sequence[Path] = ()
    define: Sequence[str] = ()
    nanobind_folder: Path | None = None
    python_include: Path = field(default_factory=lambda: Path(sysconfig.get_paths()["include"]))
    stable_abi: str = ""
    backend_module: str = ""
    warnings_as_errors: bool = False
    parts: Sequence[Part] = ()


@dataclass
class Report:
    """Facts about the finished extension."""

    binary: macho.MachO
    selectors: list[str]


def _compiler(options: Options) -> list[str]:
    return [str(zig()), "c++", "-target", f"aarch64-macos.{options.target}"]


def _flags(options: Options) -> list[str]:
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-fno-strict-aliasing"]
    flags += ["-mcpu=apple_m1", "-ffp-contract=off"]
    flags += ["-I", str(MACOS / "stubs"), "-isystem", str(metal_cpp())]
    for folder in options.include:
        flags += ["-I", str(folder)]
    flags += [f"-D{name}" for name in options.define]
    if options.nanobind_folder is not None:
        flags += ["-isystem", str(options.python_include), "-I", str(options.nanobind_folder / "include")]
        flags += ["-I", str(options.nanobind_folder / "ext" / "robin_map" / "include")]
        if options.stable_abi:
            major, minor = options.stable_abi.split(".")
            flags.append(f"-DPy_LIMITED_API=0x{int(major):02X}{int(minor):02X}0000")
        if options.backend_module:
            package = options.backend_module.replace("_", "-")
            flags += [f"-DNB_BACKEND_MODULE={options.backend_module}", f"-DNB_BACKEND_PYPI={package}"]
    return flags


def _compile(options: Options) -> list[Path]:
    flags, folder = _flags(options), build_directory() / "macos"
    warnings = ["-Wall", *(["-Werror"] if options.warnings_as_errors else [])]
    objects = [
        object_file
        for part in (Part(options.sources, ()), *options.parts)
        for object_file in compile_objects(
            _compiler(options), [*flags, *warnings, *part.flags], part.sources, folder
        )
    ]
    if options.nanobind_folder is not None and not options.backend_module:
        combined = options.nanobind_folder / "src" / "nb_combined.cpp"
        objects += compile_objects(_compiler(options), [*flags, "-w"], [combined], folder)
    return objects


def _link(options: Options, folder: Path, objects: Sequence[Path]) -> None:
    libraries = folder / "lib"
    libraries.mkdir()
    shutil.copy(MACOS / "tbd" / "libobjc.tbd", libraries)
    command = [*_compiler(options), "-shared", "-undefined", "dynamic_lookup"]
    command += ["-F", str(folder / "Frameworks"), "-L", str(libraries), "-lobjc"]
    for name in _FRAMEWORKS:
        framework = folder / "Frameworks" / f"{name}.framework"
        framework.mkdir(parents=True)
        shutil.copy(MACOS / "tbd" / f"{name}.tbd", framework)
        command += ["-framework", name]
    built = folder / options.output.name
    run([*command, *map(str, objects), "-o", str(built)])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    partial = options.output.with_name(f"{options.output.name}.{os.getpid()}")
    shutil.copy(built, partial)
    partial.rename(options.output)


def verify(path: Path, target: str) -> macho.MachO:
    """Check a finished extension; raises CrossBuildError naming every broken rule."""
    binary = macho.read(path)
    problems = []
    if binary.file_type != "dylib":
        problems.append(f"it is a {binary.file_type}, not a dylib")
    if binary.minimum_macos != target:
        problems.append(f"it is for macOS {binary.minimum_macos}, not {target}")
    if not binary.is_signed:
        problems.append("it has no code signature")
    problems += [f"it needs {name}" for name in binary.libraries if not name.startswith(_ALLOWED_LIBRARIES)]
    problems += [
        f"nothing has its symbol {symbol.name}"
        for symbol in binary.undefined
        if symbol.library is None and not symbol.weak and not symbol.name.startswith(("_Py", "__Py"))
    ]
    if problems:
        raise CrossBuildError("\n".join(f"{path.name}: {problem}" for problem in problems))
    return binary


def cross_build(options: Options) -> Report:
    """Build and check; raises CompileError or CrossBuildError."""
    objects = _compile(options)
    used = selectors.used(objects, metal_cpp())
    with tempfile.TemporaryDirectory(prefix="metalsim-macos-") as folder:
        _link(options, Path(folder), objects)
    binary = verify(options.output, options.target)
    messages = selectors.check(used, options.target)
    if messages:
        raise CrossBuildError("\n".join(messages))
    return Report(binary, used)


def nanobind_folder() -> Path:
    """The installed nanobind package; raises CrossBuildError."""
    try:
        import nanobind
    except ImportError as error:
        raise CrossBuildError(f"nanobind is not installed for {sys.executable}") from error
    return Path(os.path.dirname(nanobind.__file__))


def run_command(arguments: argparse.Namespace) -> int:
    """The `cross-build` command; returns the exit code."""
    try:
        folder = None if arguments.no_nanobind else arguments.nanobind or nanobind_folder()
        options = Options(
            sources=arguments.source,
            output=arguments.output,
            target=arguments.target,
            include=arguments.include,
            define=arguments.define,
            nanobind_folder=folder,
            stable_abi=arguments.stable_abi,
            warnings_as_errors=arguments.warnings_as_errors,
        )
        if arguments.python_include:
            options.python_include = arguments.python_include
        report = cross_build(options)
    except (CompileError, CrossBuildError, macho.MachOError) as error:
        print(error, file=sys.stderr)
        return 1
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: arm64 dylib for macOS {report.binary.minimum_macos}, {size} bytes")
    print(f"libraries: {', '.join(report.binary.libraries)}")
    print(f"{len(report.selectors)} selectors, all on the list: {', '.join(report.selectors)}")
    return 0
