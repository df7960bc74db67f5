"""Compiles C++ files to objects, again only when the file, a header it includes, or a flag changed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class CompileError(RuntimeError):
    """A compiler or linker failed; the text is its own."""


def run(command: Sequence[str]) -> None:
    """Run a tool; raises CompileError with what it printed."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(result.stderr.strip() or result.stdout.strip() or f"{command[0]} failed")


def digest(*parts: str | bytes) -> str:
    """A name for contents."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:24]


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _is_current(record: Path) -> bool:
    """Whether every file that the object was made from still has the recorded content."""
    try:
        inputs: dict[str, str] = json.loads(record.read_text())
    except (OSError, ValueError):
        return False
    return all(
        (content := _read(path)) is not None and digest(content) == key for path, key in inputs.items()
    )


def _dependencies(make_rule: Path) -> list[str]:
    """Files named in a make rule that the compiler wrote."""
    text = make_rule.read_text().replace("\\\n", " ")
    return text.split(":", 1)[1].replace("\\ ", "\0").split()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: others wait for its object instead of compiling it as well."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_object(compiler: Sequence[str], flags: Sequence[str], source: Path, folder: Path) -> Path:
    """Object file of `source` in `folder`. Raises CompileError."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{source.stem}-{digest(str(source.resolve()), *compiler, *flags)}"
    target, record = folder / f"{stem}.o", folder / f"{stem}.json"
    if target.exists() and _is_current(record):
        return target
    with _locked(folder / f"{stem}.lock"):
        if target.exists() and _is_current(record):
            return target
        partial, rule = folder / f"{stem}.{os.getpid()}.o", folder / f"{stem}.{os.getpid()}.d"
        started = time.time()
        try:
            run([*compiler, *flags, "-MD", "-MF", str(rule), "-c", str(source), "-o", str(partial)])
            # The compiler's own headers change only with its version, which is part of its path.
            pinned = str(Path(compiler[0]).parent)
            files = (path for path in _dependencies(rule) if not path.startswith(pinned))
            inputs = {path: digest(_read(path) or b"") for path in files}
            record.unlink(missing_ok=True)
            partial.rename(target)
            if all(os.stat(path).st_mtime < started for path in inputs):  # else one changed while it was read
                record.write_text(json.dumps(inputs))
        finally:
            partial.unlink(missing_ok=True)
            rule.unlink(missing_ok=True)
    return target
