"""Files that hold states of conversations: a checked header, then blocks of bytes, each with its digest.

Layout, little-endian::

    8 bytes   magic
    4 bytes   length of the header
    16 bytes  BLAKE2b digest of the header
    header    JSON: format, kind, identity, meta, and name, size and digest of each block
    blocks    one after the other, in the header's order

A file is written under a temporary name, brought to the disk and then renamed: under its own name it is
whole or absent, whenever the process or the machine stops.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from lily_py.errors import InvalidArgumentError, SavedStateError

FORMAT = 1
"""Of files written by this version; others are refused."""
SUFFIX = ".lily"
TEMPORARY_SUFFIX = ".partial"

Bytes = NDArray[numpy.uint8]

_MAGIC = b"LILYSTAT"
_LEADING = struct.Struct("<8sI16s")
_MAX_HEADER = 1 << 28


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        identity: of the model whose states these are.
        meta: whatever the writer of this kind of file noted.
        blocks: (name, bytes, digest in hexadecimal) in order.
        offset: of the first block in the file.
    """

    identity: dict[str, Any]
    meta: dict[str, Any]
    blocks: tuple[tuple[str, int, str], ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.offset + sum(size for _, size, _ in self.blocks)


def checked_path(name: str, value: Any) -> Path:
    """Return a path as a person writes it, ``~`` expanded.

    Args:
        name: of the argument.
        value: text or a path.

    Raises:
        InvalidArgumentError: something else, nothing, or a zero in it.
    """
    text = value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"{name} must be a path, not empty, got {value!r}")
    return Path(os.path.expanduser(text))


def write_state_file(
    path: Path,
    kind: str,
    identity: Mapping[str, Any],
    meta: Mapping[str, Any],
    blocks: Sequence[tuple[str, NDArray[Any]]],
) -> int:
    """Write a file that only its owner may read, replacing an older one in one step; return its bytes.

    Raises:
        OSError: it can't be written; the older file, if there is one, is untouched.
    """
    pieces = [(name, numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)) for name, array in blocks]
    header = json.dumps(
        {
            "format": FORMAT,
            "kind": kind,
            "identity": dict(identity),
            "meta": dict(meta),
            "blocks": [(name, piece.size, _digest(piece.data).hex()) for name, piece in pieces],
        },
        separators=(",", ":"),
    ).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(_LEADING.pack(_MAGIC, len(header), _digest(header)))
            file.write(header)
            for _, piece in pieces:
                file.write(piece.data)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return nbytes


def read_header(path: Path, kind: str) -> Header:
    """Read what a file says of itself; its blocks are only known to have the right size together.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it isn't such a file, is damaged, or was written by another version.
    """
    with _open(path) as file:
        leading = file.read(_LEADING.size)
        if len(leading) < _LEADING.size or leading[:8] != _MAGIC:
            raise SavedStateError(f"{path}: not a file of saved states")
        _, length, digest = _LEADING.unpack(leading)
        text = file.read(length) if length <= _MAX_HEADER else b""
        if _digest(text) != digest:
            raise SavedStateError(f"{path}: damaged: the header doesn't match its checksum")
        header = _parse(path, kind, text, _LEADING.size + length)
        actual = os.fstat(file.fileno()).st_size
        if actual != header.nbytes:
            raise SavedStateError(f"{path}: damaged: has {actual} bytes instead of {header.nbytes}")
        return header


def read_state_file(
    path: Path, kind: str, only: frozenset[str] | None = None
) -> tuple[Header, dict[str, Bytes]]:
    """Read a file; return its header and its blocks, each found to match its checksum.

    Args:
        path: the file.
        kind: that it must have.
        only: names of the blocks to read; None for all.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: as for `read_header`, and for blocks that don't match.
    """
    header = read_header(path, kind)
    blocks: dict[str, Bytes] = {}
    with _open(path) as file:
        file.seek(header.offset)
        for name, size, digest in header.blocks:
            if only is not None and name not in only:
                file.seek(size, os.SEEK_CUR)
                continue
            block = numpy.fromfile(file, numpy.uint8, size)
            if block.size != size or _digest(block.data).hex() != digest:
                raise SavedStateError(f"{path}: damaged: block {name!r} doesn't match its checksum")
            blocks[name] = block
    return header, blocks


def discard_partial(path: Path) -> None:
    """Remove what processes that no longer exist left of their attempts to write this file."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
        process = left.name[len(path.name) + 2 :].partition("-")[0]
        if process.isdigit() and not _is_running(int(process)):
            left.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _parse(path: Path, kind: str, text: bytes, offset: int) -> Header:
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise SavedStateError(
                f"{path}: has format {values['format']}, this version of lily reads format {FORMAT}; "
                "save it again with this version"
            )
        if values["kind"] != kind:
            raise SavedStateError(f"{path}: holds a {values['kind']}, not a {kind}")
        blocks = tuple((str(name), int(size), str(digest)) for name, size, digest in values["blocks"])
        if any(size < 0 for _, size, _ in blocks):
            raise SavedStateError(f"{path}: damaged: a block of negative size")
        return Header(dict(values["identity"]), dict(values["meta"]), blocks, offset)
    except SavedStateError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SavedStateError(f"{path}: damaged: the header can't be understood ({error!r})") from error


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SavedStateError(f"{path}: can't be read ({error.strerror})") from error


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
