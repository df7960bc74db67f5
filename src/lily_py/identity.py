"""What a saved state belongs to: the model, its numbers' formats, and how they are computed with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lily_py import _core
from lily_py.checkpoint import Checkpoint, TensorSlice, Weight
from lily_py.errors import SavedStateError
from lily_py.memory import PAGE_TOKENS

_WHOLE = 1 << 16
_SAMPLES = 8
_SAMPLE = 1 << 10
"""Tensors of up to `_WHOLE` bytes are read whole, of others so many samples of so many bytes."""


def state_identity(
    checkpoint: Checkpoint, model: _core.Model, kv_dtype: str, ablate: Sequence[str]
) -> dict[str, Any]:
    """Return what must be equal for states to be exchanged, each under the name that messages give it.

    Weights are recognised by names, shapes and formats, by all bytes of small tensors and by samples of large
    ones: a fine-tuned copy differs from its original, and a model of 20 GB takes a moment.
    """
    # An MTP head, which may come and go, has no part in the state.
    trunk = {name: weight for name, weight in checkpoint.weights.items() if not name.startswith("mtp.")}
    config = json.dumps(dataclasses.asdict(checkpoint.config), sort_keys=True, default=str)
    return {
        "model": checkpoint.config.model_type,
        "configuration": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "quantisation": _quantisation(trunk),
        "weights": _weights_digest(checkpoint, trunk),
        "kv_dtype": kv_dtype,
        "page_tokens": PAGE_TOKENS,
        "page_bytes": model.kv_bytes_per_token * PAGE_TOKENS,
        "recurrent_bytes": model.recurrent_bytes,
        "backend": model.backend.split()[0],
        "ablate": sorted(ablate),
    }


def require_identity(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Check that a saved state belongs to the loaded model.

    Raises:
        SavedStateError: names everything that differs, with both values.
    """
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if names:
        differences = "; ".join(
            f"{name} {found.get(name)!r} (saved) and {expected.get(name)!r} (loaded)" for name in names
        )
        raise SavedStateError(
            f"{what}: was saved by another model or setting: {differences}; load it with the checkpoint and "
            "options that saved it"
        )


def _quantisation(weights: Mapping[str, Weight]) -> str:
    """Return the formats of the weights with their shares of the bytes, as ``affine 4-bit g64 93%``."""
    sizes: dict[str, int] = {}
    for weight in weights.values():
        kind = weight.quantization
        name = weight.data.dtype if kind is None else f"{kind.mode} {kind.bits}-bit g{kind.group_size}"
        sizes[name] = sizes.get(name, 0) + weight.nbytes
    total = sum(sizes.values()) or 1
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {100 * size / total:.1f}%" for name, size in ordered)


def _weights_digest(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    descriptors = [os.open(path, os.O_RDONLY) for path in checkpoint.files]
    try:
        for name, weight in sorted(weights.items()):
            digest.update(f"{name} {weight.quantization}".encode())
            for part in (weight.data, weight.scales, weight.biases):
                if part is not None:
                    digest.update(f"{part.dtype} {part.shape}".encode())
                    for offset, count in _places(part):
                        digest.update(os.pread(descriptors[part.file], count, offset))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return digest.hexdigest()


def _places(tensor: TensorSlice) -> list[tuple[int, int]]:
    """Return (offset, bytes) of what is read of a tensor."""
    if tensor.nbytes <= _WHOLE:
        return [(tensor.offset, tensor.nbytes)]
    step = (tensor.nbytes - _SAMPLE) // (_SAMPLES - 1)
    return [(tensor.offset + i * step, _SAMPLE) for i in range(_SAMPLES)]
