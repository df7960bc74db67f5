"""Builds libmetalsim.so, compiles kernel libraries, and knows the flags for host code."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import paths
from .msl.emit import execution_source
from .msl.frontend import DEFAULT_LANGUAGE, load
from .msl.lexer import SourceError
from .msl.swizzles import swizzle_macros
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


class BuildError(RuntimeError):
    """A compilation failed; the text is the compiler's."""


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(result.stderr.strip() or result.stdout.strip() or f"{command[0]} failed")


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def _hash_files(files: Sequence[Path], *parts: str) -> str:
    return _hash(*parts, *(f.read_bytes() for f in sorted(files)))


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
    folder.mkdir(parents=True, exist_ok=True)
    header = folder / "metalsim_swizzles.inc"
    text = swizzle_macros()
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    return folder


def build_library() -> Path:
    """Build libmetalsim.so where its sources changed; returns its path. Raises BuildError."""
    output = library_path()
    sources = sorted([*paths.RUNTIME.glob("*.cpp"), *paths.OBJC.glob("*.cpp")])
    headers = [*paths.RUNTIME.glob("*.hpp"), *paths.OBJC.glob("*.hpp"), *(paths.SHIM / "exec").glob("*.hpp")]
    headers += [*(paths.HOME / "include").glob("*.h"), *paths.LINUX_STUBS.rglob("*.h")]
    stamp = output.with_suffix(".stamp")
    flags = [
        *_TARGET, "-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
        "-Wno-unused-parameter",
        "-I", str(paths.HOME / "include"), "-I", str(paths.RUNTIME), "-I", str(paths.SHIM / "exec"),
        "-I", str(paths.LINUX_STUBS),
        f'-DMETALSIM_TOOLS_DIRECTORY="{paths.HOME.parent}"',
        f'-DMETALSIM_PYTHON_EXECUTABLE="{sys.executable}"',
    ]  # fmt: skip
    common = _hash_files(headers, ZIG_VERSION, *flags)
    wanted = _hash_files(sources, common)
    if output.exists() and stamp.exists() and stamp.read_text() == wanted:
        return output
    objects = []
    folder = paths.build_directory() / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        object_file = folder / f"{source.stem}-{_hash(common, source.read_bytes())}.o"
        if not object_file.exists():
            for old in folder.glob(f"{source.stem}-*.o"):
                old.unlink()
            partial = object_file.with_suffix(f".{os.getpid()}.o")
            _run([str(zig()), "c++", *flags, "-c", str(source), "-o", str(partial)])
            partial.rename(object_file)
        objects.append(str(object_file))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(f".{os.getpid()}")
    _run(
        [
            str(zig()),
            "c++",
            *_TARGET,
            "-shared",
            f"-Wl,-soname,{LIBRARY}",
            *objects,
            "-o",
            str(partial),
            "-ldl",
            "-lpthread",
        ]
    )
    partial.rename(output)
    stamp.write_text(wanted)
    return output


def build_program(sources: Sequence[Path], name: str, options: Sequence[str] = ()) -> Path:
    """Executable from host sources on metal-cpp, cached by content. Raises BuildError."""
    build_library()
    flags = [*host_flags(), "-O1", "-g1", "-Wall", *options]
    folder = paths.build_directory() / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sources:
        siblings = [*source.parent.glob("*.hpp")]
        key = _hash_files([source, *siblings, *(paths.HOME / "include").glob("*.h")], ZIG_VERSION, *flags)
        object_file = folder / f"{source.stem}-{key}.o"
        if not object_file.exists():
            partial = object_file.with_suffix(f".{os.getpid()}.o")
            _run([str(zig()), "c++", *flags, "-c", str(source), "-o", str(partial)])
            partial.rename(object_file)
        objects.append(object_file)
    output = folder / f"{name}-{_hash(*(o.name for o in objects))}"
    if not output.exists():
        partial = output.with_suffix(f".{os.getpid()}")
        _run([str(zig()), "c++", *_TARGET, *map(str, objects), *link_flags(), "-o", str(partial)])
        partial.rename(output)
    return output


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
    """Kernel library of one .metal file, cached by content. Raises SourceError or BuildError."""
    generated = _write_swizzles()
    module = load(
        source, include=include, define=define, language=language, implicit_buffers=implicit_buffers
    )
    if module.errors:
        raise SourceError("\n".join(module.errors))
    text = execution_source(module, "metal_exec.hpp")
    flags = [*kernel_flags(checked), "-I", str(paths.SHIM / "exec"), "-I", str(generated)]
    headers = [*(paths.SHIM / "exec").glob("*.hpp"), generated / "metalsim_swizzles.inc"]
    key = _hash_files(headers, ZIG_VERSION, text, *flags)
    folder = paths.build_directory() / "kernels"
    output = folder / f"{source.stem}-{key}.so"
    if output.exists():
        return output
    folder.mkdir(parents=True, exist_ok=True)
    cpp = folder / f"{source.stem}-{key}.{os.getpid()}.cpp"
    partial = cpp.with_suffix(".so")
    cpp.write_text(text)
    try:
        # Two steps: instrumented, but linked against the simulator instead of the sanitizer's runtime.
        # Of the C++ library kernels use only headers.
        _run([str(zig()), "c++", *flags, "-c", str(cpp), "-o", str(partial.with_suffix(".o"))])
        link = ["-shared", "-L", str(build_library().parent), "-lmetalsim"]
        _run([str(zig()), "cc", *_TARGET, str(partial.with_suffix(".o")), *link, "-o", str(partial)])
        partial.rename(output)
    finally:
        cpp.unlink(missing_ok=True)
        partial.with_suffix(".o").unlink(missing_ok=True)
    return output
