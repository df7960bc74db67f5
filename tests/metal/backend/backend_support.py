"""What tests of the Metal backend share: models of the package that runs on the simulator."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.shapes import Shape

Ids = NDArray[np.int32]
EXACT = {"ablate": ("bf16_activations",), "kv_dtype": "float32"}
"""No number of the computation is rounded to less than fp32, as on the CPU."""


def load(folder: Path, backend: str = "metal", **options: Any) -> Any:
    """The native model of a checkpoint, from the package that `metal_lily` has put in place."""
    loader = importlib.import_module("lily_py.loader")
    checkpoint = importlib.import_module("lily_py.checkpoint").open_checkpoint(folder)
    return loader.load_model(checkpoint, backend=backend, **({"threads": 1} | options))


def sampler_of(vocabulary: int, seed: int = 0, **options: Any) -> Any:
    """A native sampler; by default it takes the largest logit."""
    sampling = importlib.import_module("lily_py.sampling")
    return sampling.SamplingOptions(**({"temperature": 0.0} | options)).make_sampler(seed, vocabulary)


def with_positions(folder: Path, copy: Path, positions: int) -> Path:
    """A copy of a tiny checkpoint for a longer context."""
    shutil.copytree(folder, copy)
    text = (copy / "config.json").read_text()
    assert text.count('"max_position_embeddings": 4096') == 1
    text = text.replace('"max_position_embeddings": 4096', f'"max_position_embeddings": {positions}')
    (copy / "config.json").write_text(text)
    return copy


def ids_of(vocabulary: int, length: int, seed: int = 0) -> Ids:
    """A prompt of random tokens."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def continued(model: Any, sequence: Any, prompt: Ids, count: int, vocabulary: int) -> list[int]:
    """The greedy continuation of a sequence that is fed `prompt`, in steps."""
    tokens = [int(model.forward(sequence, prompt).argmax())]
    sampler = sampler_of(vocabulary)
    while len(tokens) < count:
        tokens.append(model.step(sequence, tokens[-1], sampler))
    return tokens


def state_bytes(sequence: Any, recurrent: int, attention: int) -> list[bytes]:
    """Every number of a sequence's state, layer by layer."""
    parts = [sequence.recurrent_state(layer).tobytes() for layer in range(recurrent)]
    parts += [sequence.conv_state(layer).tobytes() for layer in range(recurrent)]
    return parts + [part.tobytes() for layer in range(attention) for part in sequence.keys_values(layer)]


def prompt(model: Any, shape: Shape, rows: int = 75) -> tuple[Any, list[bytes], dict[str, int]]:
    """Logits of a prompt's last token, the state's bytes, and what the prompt counted."""
    sequence, before = model.new_sequence(), model.counts
    logits = model.forward(sequence, ids_of(shape.vocab, rows))
    counts = {name: count - before[name] for name, count in model.counts.items()}
    attention = sum(map(shape.is_attention, range(shape.layers)))
    return logits, state_bytes(sequence, shape.layers - attention, attention), counts


def all_chosen(shape: Shape) -> Shape:
    """The shape with no experts to choose from: every token goes to all of them."""
    return replace(shape, experts=shape.top_k) if shape.is_moe else shape
