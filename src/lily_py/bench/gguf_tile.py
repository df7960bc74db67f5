"""A GGUF of any depth from one of a slice, by repeating its layers: for speed and memory only.

Quantising the whole model again would take an hour; a slice takes minutes and its layers have the same sizes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lily_py.bench.extras import require
from lily_py.errors import InvalidArgumentError


def tile_gguf(source: Path, path: Path, layers: int, *, progress: bool | None = None) -> Path:
    """Write the model of `source` with its layers repeated in order until there are `layers` of them.

    Args:
        progress: show a bar; None shows it on a terminal only.

    Raises:
        InvalidArgumentError: `source` isn't there, or `layers` isn't a multiple of its own number.
    """
    gguf = require("gguf")
    if not source.is_file():
        raise InvalidArgumentError(f"{source}: no such file")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    count_key = f"{architecture}.block_count"
    own = int(reader.fields[count_key].contents())
    if layers < own or layers % own:
        raise InvalidArgumentError(f"layers must be a multiple of the {own} of {source}, got {layers}")
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            value = layers if name == count_key else field.contents()
            writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if is_array else None)
    tensors: list[tuple[str, Any]] = [(t.name, t) for t in reader.tensors if not t.name.startswith("blk.")]
    for layer in range(layers):
        prefix = f"blk.{layer % own}."
        tensors += [
            (re.sub(r"^blk\.\d+\.", f"blk.{layer}.", t.name), t)
            for t in reader.tensors
            if t.name.startswith(prefix)
        ]
    for name, tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tqdm(
        tensors, unit="tensor", desc=path.name, disable=None if progress is None else not progress
    ):
        writer.write_tensor_data(tensor.data)
    writer.close()
    return path
