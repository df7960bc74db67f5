"""Stored states on disk, so that they outlive the process.

A folder for each identity (model, formats, settings); in it a file for each stored prefix, with its tokens,
its recurrent state and its last pages of keys and values. The pages before those lie in files of their own,
512 tokens each, named by all the tokens up to their end: keys and values follow from the tokens alone, bit
for bit, so that prefixes of one conversation share them.

The modification times are the times of last use, and the oldest files leave first. A prefix's pages are never
older than the prefix, so nothing needs to be counted: what nobody uses grows old. A file that is missing or
damaged costs its prefix, which is then computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from lily_py import _core
from lily_py.errors import InvalidArgumentError, SavedStateError
from lily_py.identity import require_identity
from lily_py.memory import PAGE_TOKENS, parse_size
from lily_py.prefix_index import PrefixIndex, Tokens
from lily_py.state_file import SUFFIX, TEMPORARY_SUFFIX, Bytes, read_state_file, write_state_file

logger = logging.getLogger("lily")

DEFAULT_DISK_BYTES = 16 << 30
"""Budget of a store on disk, if half of the free space there allows it."""
GROUP_PAGES = 8
"""Pages of keys and values in a file that prefixes share."""
_GROUP_TOKENS = GROUP_PAGES * PAGE_TOKENS
_PREFIX, _PAGES = "prefix", "pages"


def disk_budget(folder: Path, nbytes: int | float | str | None) -> int:
    """Return the bytes of a `cache_dir_bytes` argument; None is 16 GiB, or half of what is free there."""
    if nbytes is not None:
        return parse_size("cache_dir_bytes", nbytes)
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path("/"))
    return min(DEFAULT_DISK_BYTES, shutil.disk_usage(there).free // 2)


class DiskStore:
    """Prefixes in files. Any thread and several processes may use one folder.

    Prefixes are written by a thread of their own, newest first; `close` waits for it.

    Args:
        folder: of all models' stores; made if it isn't there.
        budget: bytes that all files in it may take together.
        model: whose states these are.
        identity: of that model and its settings.

    Raises:
        InvalidArgumentError: the folder can't be used.
    """

    def __init__(self, folder: Path, budget: int, model: _core.Model, identity: Mapping[str, Any]) -> None:
        self.budget = budget
        self._root = folder
        self._model = model
        self._identity = dict(identity)
        name = hashlib.blake2b(json.dumps(self._identity, sort_keys=True).encode(), digest_size=8)
        self._folder = folder / name.hexdigest()
        self._index: PrefixIndex[Path] = PrefixIndex()
        self._waiting: list[tuple[Tokens, int]] = []
        self._writing = False
        self._failed = False
        self._closing = False
        self._condition = threading.Condition()
        self._source: Callable[[Tokens], _core.Prefix | None] = lambda _: None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._locked():
                for left in self._folder.glob(f".*{TEMPORARY_SUFFIX}"):
                    left.unlink(missing_ok=True)
                self._trim()
        except OSError as error:
            raise InvalidArgumentError(f"cache_dir {str(folder)!r} can't be used: {error}") from error
        paths = [path for path in self._folder.glob(f"{_PREFIX}-*{SUFFIX}") if path.is_file()]
        for path in sorted(paths, key=_last_use):
            self._remember(path)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, those of other models included."""
        return sum(size for _, size, _ in self._files())

    def tokens(self) -> list[Tokens]:
        """Return the tokens of every prefix."""
        with self._condition:
            return [tokens for tokens, _ in self._index]

    def start(self, source: Callable[[Tokens], _core.Prefix | None]) -> None:
        """Allow `add`; `source` gives the prefix of tokens that were added, or None if it is gone."""
        self._source = source

    def find(self, tokens: Tokens, limit: int, beyond: int) -> _core.Prefix | None:
        """Load the longest prefix of `tokens` with more than `beyond` and at most `limit` tokens."""
        while True:
            with self._condition:
                found = self._index.find(tokens, limit, beyond)
            if found is None:
                return None
            try:
                return self._load(*found)
            except (SavedStateError, InvalidArgumentError, OSError) as error:
                if found[1].exists():
                    self._drop(*found, error)
                else:  # its time was over: whoever wrote last, here or in another process, removed it
                    with self._condition:
                        self._index.pop(found[0])

    def use(self, tokens: Tokens) -> None:
        """Note that the prefix of exactly these tokens, if it is here, was used."""
        with self._condition:
            path = self._index.get(tokens)
        if path is not None:
            self._touch(path, self._groups(tokens), time.time_ns())

    def add(self, tokens: Tokens) -> None:
        """Have the prefix of exactly these tokens written, unless it is there already."""
        with self._condition:
            if self._failed or self._closing or self._index.get(tokens) is not None:
                return
            if any(numpy.array_equal(tokens, waiting) for waiting, _ in self._waiting):
                return
            self._waiting.append((tokens, time.time_ns()))
            if not self._writing:
                # It lives as long as there is something to write: an engine that is dropped leaves none.
                self._writing = True
                threading.Thread(target=self._write_waiting, name="lily-disk-store").start()

    def flush(self) -> None:
        """Wait until everything added has been written."""
        with self._condition:
            self._condition.wait_for(lambda: not self._writing)

    def close(self) -> None:
        """Write what is waiting, and end; may be called again."""
        with self._condition:
            self._closing = True
        self.flush()

    # ---- reading

    def _remember(self, path: Path) -> None:
        """Add a file that was found to the index; one that is damaged goes."""
        try:
            header, blocks = read_state_file(path, _PREFIX, frozenset(["tokens"]))
            require_identity(header.identity, self._identity, str(path))
            tokens = _tokens_of(blocks, path)
        except (SavedStateError, OSError) as error:
            self._drop(None, path, error)
        else:
            self._index.put(tokens, path)

    def _load(self, tokens: Tokens, path: Path) -> _core.Prefix:
        header, blocks = read_state_file(path, _PREFIX)
        require_identity(header.identity, self._identity, str(path))
        if not numpy.array_equal(_tokens_of(blocks, path), tokens):
            raise SavedStateError(f"{path}: holds other tokens than its name says")
        pages: list[Bytes] = []
        groups = self._groups(tokens)
        for group in groups:
            pages += self._load_group(group)
        pages += _pages_of(blocks, _page_count(tokens) - len(pages), path)
        if "recurrent" not in blocks:
            raise SavedStateError(f"{path}: has no recurrent state")
        prefix = _core.restore_prefix(self._model, tokens, pages, blocks["recurrent"])
        self._touch(path, groups, time.time_ns())
        return prefix

    def _load_group(self, path: Path) -> list[Bytes]:
        try:
            header, blocks = read_state_file(path, _PAGES)
            require_identity(header.identity, self._identity, str(path))
            return _pages_of(blocks, GROUP_PAGES, path)
        except SavedStateError:
            path.unlink(missing_ok=True)  # so that it is written anew
            raise

    def _drop(self, tokens: Tokens | None, path: Path, error: Exception) -> None:
        logger.warning("%s: dropped from the store on disk: %s", path, error)
        with self._condition:
            if tokens is not None:
                self._index.pop(tokens)
        try:
            path.unlink(missing_ok=True)
        except OSError as failure:
            logger.warning("%s: can't be removed: %s", path, failure)

    # ---- writing

    def _write_waiting(self) -> None:
        while True:
            with self._condition:
                if not self._waiting:
                    self._writing = False
                    self._condition.notify_all()
                    return
                tokens, used = self._waiting.pop()
            try:
                prefix = self._source(tokens)
                if prefix is not None:
                    self._write(tokens, prefix, used)
            except Exception as error:  # whatever it is, a cache mustn't end the caller's work
                logger.warning("%s: nothing more is written to the store on disk: %s", self._folder, error)
                with self._condition:
                    self._failed = True
                    self._waiting.clear()

    def _write(self, tokens: Tokens, prefix: _core.Prefix, used: int) -> None:
        pages: list[tuple[str, NDArray[Any]]] = [
            (str(number), page) for number, page in enumerate(prefix.pages())
        ]
        path = self._folder / f"{_PREFIX}-{_name(tokens)}{SUFFIX}"
        groups = self._groups(tokens)
        with self._locked():
            for number, group in enumerate(groups):
                if not group.exists():
                    own = pages[number * GROUP_PAGES : (number + 1) * GROUP_PAGES]
                    write_state_file(group, _PAGES, self._identity, {}, own)
            rest = pages[len(groups) * GROUP_PAGES :]
            own = [("tokens", tokens), ("recurrent", prefix.recurrent()), *rest]
            write_state_file(path, _PREFIX, self._identity, {}, own)
            self._touch(path, groups, used)
            with self._condition:
                self._index.put(tokens, path)
            self._trim()

    def _trim(self) -> None:
        """Remove the files used least recently until the budget is kept."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        removed = set()
        for _, size, path in files:
            if total <= self.budget:
                break
            path.unlink(missing_ok=True)
            removed.add(path)
            total -= size
        with self._condition:
            for tokens in [tokens for tokens, path in self._index if path in removed]:
                self._index.pop(tokens)

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return (last use, bytes, path) of every file of every model."""
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _touch(self, path: Path, groups: list[Path], used: int) -> None:
        """Note the time of use, in nanoseconds: of a prefix, and no earlier than it of its pages."""
        for later, file in enumerate((path, *groups)):
            try:
                latest = max(used + later, 0 if file is path else file.stat().st_mtime_ns)
                os.utime(file, ns=(latest, latest))
            except FileNotFoundError:  # another process removed it
                continue

    def _groups(self, tokens: Tokens) -> list[Path]:
        """Return the files of shared pages that a prefix has."""
        digest = _new_digest()
        groups = []
        for end in range(_GROUP_TOKENS, len(tokens) + 1, _GROUP_TOKENS):
            digest.update(_bytes_of(tokens[end - _GROUP_TOKENS : end]))
            groups.append(self._folder / f"{_PAGES}-{digest.hexdigest()}{SUFFIX}")
        return groups

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing; the system lets go of it if this one dies."""
        with open(self._root / "lock", "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _last_use(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _name(tokens: Tokens) -> str:
    digest = _new_digest()
    digest.update(_bytes_of(tokens))
    return digest.hexdigest()


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype("<i4").tobytes()


def _page_count(tokens: Tokens) -> int:
    return -(-len(tokens) // PAGE_TOKENS)


def _tokens_of(blocks: Mapping[str, Bytes], path: Path) -> Tokens:
    block = blocks.get("tokens")
    if block is None or block.size % 4 or not block.size:
        raise SavedStateError(f"{path}: has no tokens")
    return block.view(numpy.int32)


def _pages_of(blocks: Mapping[str, Bytes], count: int, path: Path) -> list[Bytes]:
    pages = [block for name, block in blocks.items() if name.isdigit()]
    if len(pages) != count:
        raise SavedStateError(f"{path}: has {len(pages)} pages instead of {count}")
    return pages
