"""Compiles C++ files to objects, again only when the file, a header it includes, or a flag changed.

Several processes may build in one folder at the same time: what one makes the others wait for and use, and no
file is seen half written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import threading
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
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """One process (and one thread of it) at a time; gives False if another is there and `wait` is False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def write_changed(path: Path, text: str) -> None:
    """Write a file, at once, if its content is another."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_text(text)
    partial.rename(path)


def compile_object(compiler: Sequence[str], flags: Sequence[str], source: Path, folder: Path) -> Path:
    """Object file of `source` in `folder`. Raises CompileError."""
    return compile_objects(compiler, flags, [source], folder)[0]


def compile_objects(
    compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], folder: Path
) -> list[Path]:
    """Object files of `sources` in `folder`. Raises CompileError.

    What another process is compiling is left to it until all else is done, so that processes share the work.
    """
    keys = [digest(str(source.resolve()), *compiler, *flags) for source in sources]
    targets = [folder / f"{source.stem}-{key}.o" for source, key in zip(sources, keys, strict=True)]
    pairs = list(zip(sources, targets, strict=True))
    busy = [pair for pair in pairs if not _compile(compiler, flags, *pair, wait=False)]
    for pair in busy:
        _compile(compiler, flags, *pair, wait=True)
    return targets


def _compile(compiler: Sequence[str], flags: Sequence[str], source: Path, target: Path, wait: bool) -> bool:
    """Whether the object is there and current; False only if another process is at it and `wait` is False."""
    record = target.with_suffix(".json")
    if target.exists() and _is_current(record):
        return True
    with locked(target.with_suffix(".lock"), wait) as alone:
        if not alone:
            return False
        if target.exists() and _is_current(record):
            return True
        partial = target.with_name(f"{target.stem}.{os.getpid()}.o")
        rule = partial.with_suffix(".d")
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
                write_changed(record, json.dumps(inputs))
        finally:
            partial.unlink(missing_ok=True)
            rule.unlink(missing_ok=True)
    return True
