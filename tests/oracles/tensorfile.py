"""Reads and writes safetensors files with numpy alone (bf16 through ml_dtypes)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Writes `tensors` in the given order, the header padded to 8 bytes as the format's own library does."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def read(path: Path) -> dict[str, Array]:
    """All tensors of one file, each an array of the file's own type."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data, np.uint8, end - begin, 8 + size + begin)
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def read_folder(folder: Path) -> dict[str, Array]:
    """All tensors of a checkpoint: the files its index names, or every `.safetensors` at the top."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Array] = {}
    for file in files:
        tensors |= read(file)
    return tensors
