"""Synthetic checkpoints: real sizes, names and number formats, random values.

Speed and memory depend on the layout only, so they can be measured without a download. Weights have a
standard deviation of gain / sqrt(inputs), so activations keep their size from layer to layer, and routers
spread over the experts. Codes are 1..15 with bias = -8 scale: the same numbers are exact in GGUF's Q4_0.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lily_py.bench import tokenizer_stub
from lily_py.bench.shapes import ModelShape, find_shape, model_config
from lily_py.bench.shard_writer import SHARD_BYTES, TensorSpec, write_shards
from lily_py.errors import InvalidArgumentError

_GROUP = 64
_PIECE = 1 << 22
_PREFIX = "language_model.model."
_NIBBLES = np.uint32(0x11111111)
# Standard deviation of uniform codes, and the code that stands for zero.
_CODES = {4: (math.sqrt((15**2 - 1) / 12), 8.0), 8: (math.sqrt((256**2 - 1) / 12), 127.5)}

Words = NDArray[np.uint32]
Bits16 = NDArray[np.uint16]


def make_checkpoint(
    shape: str | ModelShape,
    folder: Path,
    *,
    seed: int = 0,
    force: bool = False,
    progress: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint in the layout of mlx-community's 4-bit conversions and return its folder.

    A tensor's values depend on the seed and on its name only. `config.json` is written last, so a folder
    whose making was interrupted can't be taken for a checkpoint.

    Args:
        shape: sizes, or their name in `SHAPES`.
        force: replace a folder that isn't empty.
        progress: show a bar; None shows it on a terminal only.

    Raises:
        InvalidArgumentError: an unknown shape, a folder that isn't empty, too little space on the disk.
    """
    sizes = find_shape(shape) if isinstance(shape, str) else shape
    tensors, quantization = checkpoint_tensors(sizes, seed)
    total = sum(tensor.nbytes for tensor in tensors)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not force or not folder.is_dir():
            raise InvalidArgumentError(f"{folder}: exists and isn't empty; pass --force to replace it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise InvalidArgumentError(
            f"{folder}: the checkpoint takes {total / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free"
        )
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=folder.name,
        disable=None if progress is None else not progress,
    ) as bar:
        write_shards(folder, tensors, shard_bytes=shard_bytes, progress=bar.update)
    eos_token_ids = tokenizer_stub.write(folder, sizes.vocab)
    config = model_config(sizes, eos_token_ids, quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def checkpoint_tensors(shape: ModelShape, seed: int) -> tuple[list[TensorSpec], dict[str, Any]]:
    """Return all tensors in order, and the configuration's quantisation block."""
    tensors: list[TensorSpec] = []
    quantization: dict[str, Any] = {"group_size": _GROUP, "bits": 4, "mode": "affine"}

    def linear(name: str, *size: int, bits: int = 4, gain: float = 1.0, tie_rows: int = 0) -> None:
        matrix = _Matrix(name, size, bits, gain, seed, tie_rows)
        if bits != 4:
            quantization[name] = {"group_size": _GROUP, "bits": bits}
        scales = (*size[:-1], size[-1] // _GROUP)
        tensors.append(TensorSpec(f"{name}.weight", "U32", (*size[:-1], size[-1] * bits // 32), matrix.codes))
        tensors.append(TensorSpec(f"{name}.scales", "BF16", scales, matrix.scales))
        tensors.append(TensorSpec(f"{name}.biases", "BF16", scales, matrix.biases))

    def values(
        name: str, size: tuple[int, ...], numbers: NDArray[np.floating[Any]], dtype: str = "BF16"
    ) -> None:
        data = numbers.astype(np.float32) if dtype == "F32" else to_bf16(numbers)
        tensors.append(TensorSpec(name, dtype, size, lambda: [data]))

    def norm(name: str, width: int) -> None:
        values(name, (width,), 1 + 0.1 * _generator(seed, name).standard_normal(width))

    hidden = shape.hidden
    # A tied embedding is also the output head; alone, it gives the first layer inputs of its outputs' size.
    embedding_gain = 2.0 if shape.tied else 0.5 * math.sqrt(hidden)
    linear(f"{_PREFIX}embed_tokens", shape.vocab, hidden, gain=embedding_gain)
    for layer in range(shape.layers):
        p = f"{_PREFIX}layers.{layer}."
        norm(f"{p}input_layernorm.weight", hidden)
        if shape.is_attention(layer):
            a, width = f"{p}self_attn.", shape.heads * shape.head_dim
            linear(f"{a}q_proj", 2 * width, hidden)
            linear(f"{a}k_proj", shape.kv_heads * shape.head_dim, hidden)
            linear(f"{a}v_proj", shape.kv_heads * shape.head_dim, hidden)
            linear(f"{a}o_proj", hidden, width, gain=0.5)
            norm(f"{a}q_norm.weight", shape.head_dim)
            norm(f"{a}k_norm.weight", shape.head_dim)
        else:
            a, width = f"{p}linear_attn.", shape.value_heads * shape.gdn_dim
            keys = shape.key_heads * shape.gdn_dim
            linear(f"{a}in_proj_qkv", shape.conv_channels, hidden, tie_rows=keys)
            linear(f"{a}in_proj_z", width, hidden)
            linear(f"{a}in_proj_b", shape.value_heads, hidden)
            linear(f"{a}in_proj_a", shape.value_heads, hidden)
            kernel = 0.5 * _generator(seed, f"{a}conv1d.weight").standard_normal(
                (shape.conv_channels, shape.conv, 1)
            )
            kernel[keys : 2 * keys] = 0.8 * kernel[:keys] + 0.6 * kernel[keys : 2 * keys]
            values(f"{a}conv1d.weight", kernel.shape, kernel)
            rates, steps = _decays(shape.value_heads, _generator(seed, f"{a}A_log"))
            values(f"{a}A_log", rates.shape, rates, "F32")
            values(f"{a}dt_bias", steps.shape, steps)
            norm(f"{a}norm.weight", shape.gdn_dim)
            linear(f"{a}out_proj", hidden, width, gain=0.5)
        norm(f"{p}post_attention_layernorm.weight", hidden)
        m = f"{p}mlp."
        if shape.experts:
            linear(f"{m}gate", shape.experts, hidden, bits=8, gain=1.5)
            linear(f"{m}switch_mlp.gate_proj", shape.experts, shape.moe_width, hidden)
            linear(f"{m}switch_mlp.up_proj", shape.experts, shape.moe_width, hidden)
            linear(f"{m}switch_mlp.down_proj", shape.experts, hidden, shape.moe_width)
            linear(f"{m}shared_expert.gate_proj", shape.shared_width, hidden)
            linear(f"{m}shared_expert.up_proj", shape.shared_width, hidden)
            linear(f"{m}shared_expert.down_proj", hidden, shape.shared_width)
            linear(f"{m}shared_expert_gate", 1, hidden, bits=8)
        else:
            linear(f"{m}gate_proj", shape.dense_width, hidden)
            linear(f"{m}up_proj", shape.dense_width, hidden)
            linear(f"{m}down_proj", hidden, shape.dense_width)
    norm(f"{_PREFIX}norm.weight", hidden)
    if not shape.tied:
        linear("language_model.lm_head", shape.vocab, hidden)
    return tensors, quantization


def _decays(heads: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``A_log`` and ``dt_bias`` as a model of the family starts its training: A in 1..16 and
    softplus(dt_bias) from 0.001 to 0.1, evenly in the logarithm."""
    steps = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), heads))
    return np.log(rng.uniform(1, 16, heads)), np.log(np.expm1(steps))


class _Matrix:
    """An affine quantised matrix [..., out, in]: its codes, scales and biases, drawn when they're written.

    The first `tie_rows` rows are queries and the next as many keys: 70 % of a key's words are its query's.
    Independent ones would be nearly orthogonal at some tokens, and the norm behind the gated delta net
    would then magnify rounding errors by thousands, which no trained model does.
    """

    def __init__(
        self, name: str, size: tuple[int, ...], bits: int, gain: float, seed: int, tie_rows: int = 0
    ) -> None:
        self._name = name
        self._size = size
        self._bits = bits
        self._gain = gain
        self._seed = seed
        self._tie_rows = tie_rows

    def codes(self) -> Iterator[Words]:
        rng = _generator(self._seed, f"{self._name}.weight")
        row = self._size[-1] * self._bits // 32
        count = math.prod(self._size[:-1]) * row
        if self._tie_rows:
            words = self._draw(rng, count).reshape(-1, row)
            queries, keys = words[: self._tie_rows], words[self._tie_rows : 2 * self._tie_rows]
            np.copyto(keys, queries, where=rng.random(keys.shape) < 0.7)
            yield words
            return
        for start in range(0, count, _PIECE):
            yield self._draw(rng, min(_PIECE, count - start))

    def _draw(self, rng: np.random.Generator, count: int) -> Words:
        words = rng.integers(0, 1 << 64, (count + 1) // 2, dtype=np.uint64).view(np.uint32)[:count]
        if self._bits == 4:  # a code of 0 becomes 8, the middle
            nonzero = words | words >> 1
            nonzero |= nonzero >> 2
            words |= (~nonzero & _NIBBLES) << 3
        return words

    def scales(self) -> Iterator[Bits16]:
        rng = _generator(self._seed, f"{self._name}.scales")
        deviation, _ = _CODES[self._bits]
        size = (math.prod(self._size[:-1]), self._size[-1] // _GROUP)
        factors = rng.uniform(0.8, 1.2, size)
        if self._tie_rows:
            factors[self._tie_rows : 2 * self._tie_rows] = factors[: self._tie_rows]
        yield to_bf16(self._gain / (math.sqrt(self._size[-1]) * deviation) * factors)

    def biases(self) -> Iterator[Bits16]:
        _, middle = _CODES[self._bits]
        for scales in self.scales():
            yield to_bf16(-middle * from_bf16(scales))


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def to_bf16(values: NDArray[np.floating[Any]]) -> Bits16:
    """Round to bfloat16, nearest even; the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
