"""Static check of a .metal file without Apple's compiler.

Metal descends from the same clang code as OpenCL, so clang's C++ for OpenCL mode has its address-space rules:
device = __global, constant = __constant, threadgroup = __local, thread = __private. What it lets pass is
found by `ast_lint`, `signature` and `vocabulary`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..paths import SHIM
from ..toolchain import zig
from .ast_lint import Lint
from .emit import CheckDialect, check_source
from .frontend import DEFAULT_LANGUAGE, preprocess
from .lexer import SourceError, TokenStream
from .rewriter import Rewriter
from .signature import check_signatures
from .vocabulary import unknown_names

_FLAGS = [
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64", "-fsyntax-only",
    "-Wall", "-Wno-unused", "-Wno-uninitialized", "-Wno-undefined-internal", "-Wno-unknown-attributes",
    "-Wno-undefined-inline", "-ferror-limit=30",
    "-Xclang",
    "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue",
]  # fmt: skip


def check(
    source: Path,
    *,
    include: Sequence[Path] = (),
    define: Sequence[str] = (),
    language: str = DEFAULT_LANGUAGE,
) -> list[str]:
    """Messages about everything that Apple's compiler would refuse; empty if the file is fine."""
    try:
        text = preprocess(source, include, define, language)
        module = Rewriter(text, source.name, CheckDialect()).run()
    except SourceError as error:
        return str(error).splitlines()
    check_signatures(module)
    if module.errors:
        return module.errors
    version = "".join(language.split(".")) + "0"
    with tempfile.TemporaryDirectory(prefix="metalsim-") as folder:
        translated = Path(folder) / f"{source.stem}.clcpp"
        translated.write_text(check_source(module, "metal_check.hpp"))
        command = [str(zig()), "clang", *_FLAGS, f"-D__METAL_VERSION__={version}", f"-I{SHIM / 'check'}"]
        compiled = subprocess.run([*command, str(translated)], capture_output=True, text=True)
        messages = compiled.stderr.replace(folder + os.sep, "").strip().splitlines()
        if compiled.returncode != 0:
            return messages or ["the compiler failed without a message"]
        dump = subprocess.run(
            [*command, "-w", "-Xclang", "-ast-dump=json", str(translated)], capture_output=True, text=True
        )
    shim_files = tuple(path.name for path in (SHIM / "check").glob("*.hpp"))
    lint = Lint(tuple(int(part) for part in language.split(".")), shim_files)  # type: ignore[arg-type]
    messages = [m for m in messages if "warning:" not in m and "error:" in m]
    messages += lint.run(json.loads(dump.stdout))
    messages += unknown_names(text, frozenset(lint.library))
    messages += _long_longs(text)
    if not module.instantiations:
        messages.append(f"{source.name}: error: the file has no kernel")
    return messages


def _long_longs(text: str) -> list[str]:
    """Messages for `long long`, a type that Metal doesn't have, and for integer literals of it."""
    stream, messages = TokenStream(text), []
    for i, token in enumerate(stream.tokens):
        shorter = re.sub(r"(?i)l(l)(u?)$", r"\1\2", token.text)
        if token.kind == "number" and shorter != token.text:
            messages.append(
                f"{stream.where(i)}: error: '{token.text}' is a literal of long long: Metal has none, "
                f"write '{shorter}' (long has 64 bits)"
            )
        elif token.text == stream.text(stream.significant(i)) == "long":
            messages.append(
                f"{stream.where(i)}: error: Metal has no 'long long': write 'long', it has 64 bits"
            )
    return messages
