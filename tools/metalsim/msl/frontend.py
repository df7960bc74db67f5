"""From a .metal file to a rewritten module: preprocess with clang, then rewrite and check signatures."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..paths import SHIM
from ..toolchain import zig
from .emit import CheckDialect, ExecutionDialect
from .lexer import SourceError
from .module import Module
from .rewriter import Dialect, Rewriter
from .signature import check_signatures, number_implicit_buffers

DEFAULT_LANGUAGE = "3.1"


def preprocess(
    source: Path, include: Sequence[Path] = (), define: Sequence[str] = (), language: str = DEFAULT_LANGUAGE
) -> str:
    """Text after clang's preprocessor, run against Metal headers that declare only macros.

    Raises SourceError with the compiler's message.
    """
    version = "".join(language.split(".")) + "0"
    command = [str(zig()), "clang", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef"]
    command += ["-D__METAL__=1", f"-D__METAL_VERSION__={version}", "-D__METAL_MACOS__=1", "-D__METALSIM__=1"]
    if int(version) >= 400:
        command.append("-D__HAVE_TENSOR__=1")
    command += ["-I", str(SHIM / "preprocess"), *(f"-I{path}" for path in include)]
    command += [*(f"-D{name}" for name in define), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SourceError(result.stderr.strip())
    return result.stdout


def load(
    source: Path,
    *,
    check: bool = False,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
    language: str = DEFAULT_LANGUAGE,
    implicit_buffers: bool = False,
) -> Module:
    """The rewritten module of one file; its `errors` are empty when it may be compiled further."""
    dialect: Dialect = CheckDialect() if check else ExecutionDialect()
    text = preprocess(source, include, define, language)
    module = Rewriter(text, source.name, dialect).run()
    if implicit_buffers:
        number_implicit_buffers(module)
    check_signatures(module)
    return module
