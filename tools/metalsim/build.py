"""Builds libmetalsim.so, compiles kernel libraries, and knows the flags for host code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import paths
from .msl.emit import execution_source
from .msl.frontend import DEFAULT_LANGUAGE, load
from .msl.lexer import SourceError
from .msl.swizzles import swizzle_macros
from .objects import compile_object, compile_objects, digest, locked, run, write_changed
from .toolchain import ZIG_VERSION, metal_cpp, zig

LIBRARY = "libmetalsim.so"
_TARGET = ["-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64_v3", "-fno-sanitize=undefined"]
_KERNEL = [
    "-std=c++17", "-fPIC", "-fdeclspec", "-fvisibility=hidden", "-g1", "-gdwarf-4", "-w", "-fno-exceptions",
    # Round half and bfloat after each operation, and take unsuffixed literals as float, as Metal does.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-Xclang", "-cl-single-precision-constant",
]  # fmt: skip
_FAST = ["-O2", "-ffp-contract=fast", "-fno-math-errno"]
_CHECKED = [
    "-DMETALSIM_CHECKED", "-O1", "-ffp-contract=fast", "-fno-math-errno",
    # Wider accesses than 16 bytes would not be instrumented.
    "-fno-vectorize", "-fno-slp-vectorize",
    "-fsanitize=thread", "-fsanitize=bounds,shift,integer-divide-by-zero",
    "-fno-sanitize-trap=all", "-fsanitize-recover=all",
    "-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1",
]  # fmt: skip


def _compiler() -> list[str]:
    return [str(zig()), "c++"]


def host_flags() -> list[str]:
    """Compiler flags for host code that includes metal-cpp, after `zig c++`."""
    return [
        *_TARGET, "-std=c++20", "-fPIC", "-fblocks",
        "-I", str(paths.LINUX_STUBS), "-I", str(paths.MACOS / "stubs"), "-isystem", str(metal_cpp()),
        "-I", str(paths.HOME / "include"),
    ]  # fmt: skip


def link_flags() -> list[str]:
    """Linker flags for host code: the simulator, found again at run time."""
    folder = library_path().parent
    return ["-L", str(folder), "-lmetalsim", f"-Wl,-rpath,{folder}"]


def library_path() -> Path:
    """Where libmetalsim.so is (to be) built."""
    return paths.build_directory() / "lib" / LIBRARY


def _write_swizzles() -> Path:
    folder = paths.build_directory() / "include"
    write_changed(folder / "metalsim_swizzles.inc", swizzle_macros())
    return folder


def _link(objects: Sequence[Path], output: Path, options: Sequence[str]) -> Path:
    """Link unless the output was made from the same objects with the same options."""
    stamp = output.with_name(output.name + ".stamp")
    wanted = digest(ZIG_VERSION, *options, *(path.read_bytes() for path in objects))
    with locked(output.with_name(output.name + ".lock")):
        if not (output.exists() and stamp.exists() and stamp.read_text() == wanted):
            partial = output.with_name(f"{output.name}.{os.getpid()}")
            run([*_compiler(), *_TARGET, *map(str, objects), *options, "-o", str(partial)])
            partial.rename(output)
            stamp.write_text(wanted)
    return output


@functools.cache
def build_library() -> Path:
    """Build libmetalsim.so where its sources changed; returns its path. Raises CompileError."""
    flags = [
        *_TARGET, "-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
        "-Wno-unused-parameter",
        "-I", str(paths.HOME / "include"), "-I", str(paths.RUNTIME), "-I", str(paths.SHIM / "exec"),
        "-I", str(paths.LINUX_STUBS),
        f'-DMETALSIM_TOOLS_DIRECTORY="{paths.HOME.parent}"',
        f'-DMETALSIM_PYTHON_EXECUTABLE="{sys.executable}"',
    ]  # fmt: skip
    folder = paths.build_directory() / "objects"
    sources = sorted([*paths.RUNTIME.glob("*.cpp"), *paths.OBJC.glob("*.cpp")])
    objects = compile_objects(_compiler(), flags, sources, folder)
    return _link(objects, library_path(), ["-shared", f"-Wl,-soname,{LIBRARY}", "-ldl", "-lpthread"])


def build_program(sources: Sequence[Path], name: str, options: Sequence[str] = ()) -> Path:
    """Executable from host sources on metal-cpp. Raises CompileError."""
    build_library()
    folder = paths.build_directory() / "programs"
    flags = [*host_flags(), "-O1", "-g1", "-Wall", *options]
    objects = compile_objects(_compiler(), flags, sources, folder)
    return _link(objects, folder / name, link_flags())


def build_extension(
    sources: Sequence[Path],
    output: Path,
    *,
    nanobind: Path,
    python_include: Path,
    options: Sequence[str] = (),
    objects: Sequence[Path] = (),
) -> Path:
    """Python extension for Linux from host sources on metal-cpp and nanobind. Raises CompileError.

    `options` are further compiler flags (`-I`, `-D`, `-O`) of the given sources; `objects` are linked too.
    """
    build_library()
    folder = paths.build_directory() / "extension"
    python = ["-isystem", str(python_include), "-I", str(nanobind / "include")]
    python += ["-I", str(nanobind / "ext" / "robin_map" / "include"), "-fvisibility=hidden"]
    flags = [*host_flags(), *python, "-g1", "-Wall", *options]
    linked = compile_objects(_compiler(), flags, sources, folder)
    combined = nanobind / "src" / "nb_combined.cpp"
    plain = [*_TARGET, *python, "-std=c++20", "-fPIC", "-O2", "-DNDEBUG", "-fno-strict-aliasing", "-w"]
    linked.append(compile_object(_compiler(), plain, combined, folder))
    return _link([*linked, *objects], output, ["-shared", *link_flags()])


def kernel_flags(checked: bool) -> list[str]:
    """Flags for rewritten kernels, after `zig c++`."""
    return [*_TARGET, *_KERNEL, *(_CHECKED if checked else _FAST)]


def compile_kernels(
    source: Path,
    *,
    checked: bool = True,
    language: str = DEFAULT_LANGUAGE,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
    implicit_buffers: bool = False,
) -> Path:
    """Kernel library of one .metal file, cached by content. Raises SourceError or CompileError."""
    generated = _write_swizzles()
    module = load(
        source, include=include, define=define, language=language, implicit_buffers=implicit_buffers
    )
    if module.errors:
        raise SourceError("\n".join(module.errors))
    text = execution_source(module, "metal_exec.hpp")
    flags = [*kernel_flags(checked), "-I", str(paths.SHIM / "exec"), "-I", str(generated)]
    headers = sorted([*(paths.SHIM / "exec").glob("*.hpp"), generated / "metalsim_swizzles.inc"])
    key = digest(ZIG_VERSION, text, *flags, *(header.read_bytes() for header in headers))
    folder = paths.build_directory() / "kernels"
    output = folder / f"{source.stem}-{key}.so"
    if output.exists():
        return output
    library = build_library()
    with locked(output.with_suffix(".lock")):
        if not output.exists():
            _compile_kernels(text, flags, library, output)
    return output


def _compile_kernels(text: str, flags: Sequence[str], library: Path, output: Path) -> None:
    cpp = output.with_name(f"{output.stem}.{os.getpid()}.cpp")
    partial, compiled = cpp.with_suffix(".so"), cpp.with_suffix(".o")
    cpp.write_text(text)
    try:
        # Two steps: instrumented, but linked against the simulator instead of the sanitizer's runtime.
        # Of the C++ library kernels use only headers.
        run([*_compiler(), *flags, "-c", str(cpp), "-o", str(compiled)])
        link = ["-shared", "-L", str(library.parent), "-lmetalsim"]
        run([str(zig()), "cc", *_TARGET, str(compiled), *link, "-o", str(partial)])
        partial.rename(output)
    finally:
        cpp.unlink(missing_ok=True)
        compiled.unlink(missing_ok=True)
