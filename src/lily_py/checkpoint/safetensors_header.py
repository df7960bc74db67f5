"""Strict reading of safetensors headers: where each tensor lies in its file, nothing believed unchecked.

Format: 8 bytes little-endian header length N, N bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then
the data, which the tensors must cover without overlap, hole or rest (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily_py.errors import CheckpointError, CheckpointNotFoundError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_DIMENSIONS = 8

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class TensorSlice:
    """A tensor's place: file (position in `Checkpoint.files`), byte offset in it, size, type, shape."""

    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, file: int = 0) -> dict[str, TensorSlice]:
    """Read the table of tensors of one safetensors file.

    Args:
        path: the file.
        file: the index to put into each slice.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it is truncated, corrupt or contradicts itself; names the file and the tensor.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header of {length} bytes is over the format's limit of {MAX_HEADER_BYTES}; "
                    "this isn't a safetensors file or it is corrupt"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: header of {length} bytes in a file of {size}: truncated, download it again"
                )
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error

    start = 8 + length
    tensors = {name: _tensor(path, name, entry, file, start) for name, entry in _entries(path, raw).items()}
    _check_coverage(path, tensors, start, size)
    return tensors


def _entries(path: Path, raw: bytes) -> dict[str, Any]:
    """Decode the JSON part and drop ``__metadata__``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise CheckpointError(f"{path}: the header names {name!r} twice")
            table[name] = value
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header isn't valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any, file: int, start: int) -> TensorSlice:
    """Check one entry of the header on its own."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: tensor {name!r}: expected an object, got {type(entry).__name__}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise CheckpointError(
            f"{path}: tensor {name!r}: shape {str(shape)[:80]} isn't a list of at most {MAX_DIMENSIONS} sizes"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{path}: tensor {name!r}: data_offsets {str(offsets)[:80]} aren't two offsets")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {dtype} {shape} takes {expected} bytes, "
            f"but data_offsets {offsets} hold {end - begin}"
        )
    return TensorSlice(file, start + begin, expected, dtype, tuple(shape))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _check_coverage(path: Path, tensors: dict[str, TensorSlice], start: int, size: int) -> None:
    """Check that the tensors fill the data exactly: no overlap, no hole, nothing missing or left over."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset < position:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps {previous!r}")
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {tensor.offset + tensor.nbytes}, the file at {size}: "
                "truncated, download it again"
            )
        if tensor.offset > position:
            raise CheckpointError(f"{path}: {tensor.offset - position} unused bytes before tensor {name!r}")
        position, previous = tensor.offset + tensor.nbytes, name
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to none")
