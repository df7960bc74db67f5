"""Safetensors shards written piece by piece, so that a checkpoint may be larger than memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from lily_py.checkpoint.safetensors_header import DTYPE_BYTES

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in a shard, about what mlx-lm writes."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be written: `pieces()` yields its values in order, in arrays of any length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_shards(
    folder: Path,
    tensors: Sequence[TensorSpec],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Write ``model.safetensors`` or its numbered shards, and the index.

    Args:
        tensors: in the order of the files.
        shard_bytes: a shard is closed before it would hold more.
        progress: called with the number of bytes of each piece written.
    """
    shards = list(_split(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        _write_shard(folder / name, shard, progress)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _split(tensors: Sequence[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _write_shard(path: Path, tensors: Sequence[TensorSpec], progress: Callable[[int], object]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                piece.tofile(file)
                written += piece.nbytes
                progress(piece.nbytes)
            if written != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {written} bytes for {tensor.nbytes}")
