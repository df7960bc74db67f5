"""Runs the native core on a checkpoint folder and returns its outputs in the oracles' shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles import tensorfile
from oracles.result import TOLERANCES, Result
from oracles.shapes import SHAPES, Shape

from lily_py import _core
from lily_py.checkpoint import open_checkpoint
from lily_py.loader import load_model

Ids = NDArray[np.int32]
Tiny = Callable[..., Path]

# Beyond the oracles' own shapes: more query heads per KV head than one pass takes, states cut into strips of
# 64 and 16 columns (80, 48), widths that are no multiple of 64 or of 16, experts of unequal width.
ALL_SHAPES: dict[str, Shape] = SHAPES | {
    "kv_ratio12": replace(SHAPES["dense"], heads=12, kv_heads=1),
    "gdn_dim80": replace(SHAPES["dense"], gdn_dim=80),
    "gdn_dim48": replace(SHAPES["dense"], gdn_dim=48),
    "narrow": replace(SHAPES["dense"], hidden=96, dense_width=160, head_dim=48, vocab=290),
    "conv2": replace(SHAPES["dense"], conv=2),
    "unequal_experts": replace(SHAPES["moe"], layers=4, moe_width=64, shared_width=192),
    "one_expert": replace(SHAPES["moe"], layers=4, experts=1, top_k=1),
    "thin": replace(SHAPES["moe"], layers=4, hidden=160, moe_width=96, shared_width=32, vocab=301),
    "ragged": replace(
        SHAPES["moe"], layers=4, hidden=72, experts=5, top_k=3, moe_width=40, shared_width=24, vocab=301
    ),
}
FLOATS_ONLY = ("integer_dot",)  # ablation: quantised weights are multiplied in fp32, as the oracles do
INSTRUCTION_SETS = {
    "avx512vnni": (),
    "avxvnni": ("avx512vnni",),
    "avx2": ("avx512vnni", "avxvnni"),
    "generic": ("avx512vnni", "avxvnni", "avx2"),
}


def exact_model(path: Path, **options: Any) -> _core.Model:
    """The model without any deliberate rounding: fp32 products, fp32 keys and values."""
    return load_model(
        open_checkpoint(path), **({"threads": 1, "kv_dtype": "float32", "ablate": FLOATS_ONLY} | options)
    )


def model_of(path: Path, **options: Any) -> _core.Model:
    """The model with integer products, as shipped, but fp32 keys and values."""
    return load_model(open_checkpoint(path), **({"threads": 1, "kv_dtype": "float32"} | options))


def ids_of(vocabulary: int, length: int, seed: int = 0) -> Ids:
    """A prompt of random tokens."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def fed(model: _core.Model, ids: Ids | Sequence[int]) -> _core.Sequence:
    """A new sequence of these tokens."""
    sequence = model.new_sequence()
    model.forward(sequence, np.array(ids, np.int32))
    return sequence


def feed(model: _core.Model, sequence: _core.Sequence, ids: Ids) -> NDArray[np.float32]:
    """The logits [T, vocab] after each token."""
    logits = model.forward(sequence, np.ascontiguousarray(ids, np.int32), all=True)
    assert logits is not None
    return logits


def result_of(sequence: _core.Sequence, logits: NDArray[np.float32], attention: Sequence[bool]) -> Result:
    """Logits and the state of a sequence by layer; `attention` says which layers are attention.

    The core doesn't hand out hidden rows: that part has width 0.
    """
    result = Result(logits=logits, hidden=logits[:, :0])
    recurrent = cached = 0
    for layer, is_attention in enumerate(attention):
        if is_attention:
            result.keys[layer], result.values[layer] = sequence.keys_values(cached)
            cached += 1
        else:
            result.recurrent[layer] = sequence.recurrent_state(recurrent)
            result.conv[layer] = sequence.conv_state(recurrent).T
            recurrent += 1
    return result


def run(model: _core.Model, ids: Ids, attention: Sequence[bool]) -> Result:
    """Feeds a whole prompt to a new sequence."""
    sequence = model.new_sequence()
    return result_of(sequence, feed(model, sequence, ids), attention)


def without_hidden(result: Result) -> Result:
    """The oracle's result, comparable with `run`."""
    return replace(result, hidden=result.hidden[:, :0])


def assert_agrees(native: Result, oracle: Result) -> None:
    """Fails beyond the distance that two correct fp32 implementations have from each other."""
    worst = native.differences(without_hidden(oracle))
    beyond = {name: value for name, value in worst.items() if not value <= TOLERANCES[name]}
    assert not beyond, f"differences beyond {TOLERANCES}: {beyond} (all: {worst})"


def state_bytes(sequence: _core.Sequence, attention: Sequence[bool]) -> dict[str, bytes]:
    """Every number of a sequence's state, bit for bit."""
    empty = np.zeros((0, 0), np.float32)
    result = result_of(sequence, empty, attention)
    return {
        f"{kind} {layer}": array.tobytes()
        for kind in ("recurrent", "conv", "keys", "values")
        for layer, array in getattr(result, kind).items()
    }


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the tensors of a folder's `model.safetensors` in place; `change` edits name -> array."""
    tensors: dict[str, Any] = {
        n: np.array(a) for n, a in tensorfile.read(folder / "model.safetensors").items()
    }
    change(tensors)
    tensorfile.write(folder / "model.safetensors", tensors, {"format": "mlx"})
