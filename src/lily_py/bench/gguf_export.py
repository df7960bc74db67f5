"""From an MLX checkpoint to GGUF, so that llama.cpp runs the same weights.

Affine codes are repacked, not quantised again: a group of 64 becomes two GGUF blocks of 32 with its scale.
Tensor names, the order of value heads and the number types of small tensors are those of llama.cpp's
architectures ``qwen35`` and ``qwen35moe``. Needs the package `gguf` (extra ``bench``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lily_py.bench.extras import require
from lily_py.bench.gguf_vocabulary import add_vocabulary
from lily_py.bench.synthetic import from_bf16
from lily_py.checkpoint import Checkpoint, TensorSlice, Weight
from lily_py.errors import InvalidArgumentError, UnsupportedModelError

GgufType = Literal["f32", "f16", "q4_0", "q4_1"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)

_BLOCK = 32
_ROWS_AT_ONCE = 1 << 24  # weights expanded together, in fp32
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_DELTA_NET = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}

Floats = NDArray[np.float32]
Index = NDArray[np.intp]


@dataclass(frozen=True)
class _Target:
    """Where a weight goes: GGUF name, order of its rows and columns, and what its values become."""

    name: str
    rows: Index | None = None
    columns: Index | None = None
    plain: Callable[[Floats], Floats] | None = None


def export_gguf(
    checkpoint: Checkpoint, path: Path, kind: GgufType = "q4_0", *, progress: bool | None = None
) -> dict[str, int]:
    """Write the text model as GGUF.

    `q4_0` holds a 4-bit weight exactly if every bias is -8 scale; others become Q4_1, whose scale and minimum
    are fp16. What isn't 4-bit affine becomes Q8_0 there. Routers are F32, as llama.cpp's converter has them.

    Args:
        progress: show a bar; None shows it on a terminal only.

    Returns:
        How many tensors have which type, such as ``{"Q4_0": 52, "F32": 25}``.

    Raises:
        InvalidArgumentError: the package `gguf` isn't installed, or the type isn't known.
        UnsupportedModelError: a layout other than MLX's, or a tensor that has no place in GGUF.
    """
    gguf = require("gguf")
    if kind not in GGUF_TYPES:
        raise InvalidArgumentError(f"GGUF type {kind!r} isn't known; choose from {', '.join(GGUF_TYPES)}")
    reader = _Reader(checkpoint)
    targets = [
        (weight, target) for weight in checkpoint.weights.values() if (target := _target(weight, reader))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "qwen35moe" if checkpoint.config.num_experts else "qwen35")
    _add_parameters(writer, gguf, checkpoint, kind)
    types: Counter[str] = Counter()
    plans: list[Callable[[], NDArray[Any]]] = []
    for weight, target in targets:
        type_name = "F32" if target.plain else _type_for(weight, kind, reader)
        types[type_name] += 1
        raw = gguf.GGMLQuantizationType[type_name]
        shape = reader.plain(weight, target).shape if target.plain else weight.shape
        block, nbytes = gguf.GGML_QUANT_SIZES[raw]
        byte_shape = (*shape[:-1], shape[-1] // block * nbytes)
        if type_name in ("F32", "F16"):
            dtype = np.dtype(np.float32 if type_name == "F32" else np.float16)
            writer.add_tensor_info(target.name, shape, dtype, int(np.prod(byte_shape)), raw_dtype=raw)
        else:
            writer.add_tensor_info(
                target.name, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), raw_dtype=raw
            )
        plans.append(partial(reader.encode, weight, target, type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for plan in tqdm(
        plans, unit="tensor", desc=path.name, disable=None if progress is None else not progress
    ):
        writer.write_tensor_data(plan())
    writer.close()
    return dict(types)


def _add_parameters(writer: Any, gguf: Any, checkpoint: Checkpoint, kind: GgufType) -> None:
    config = checkpoint.config
    interval = config.layer_types.index("full_attention") + 1 if "full_attention" in config.layer_types else 0
    expected = tuple(
        "full_attention" if interval and (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(config.num_hidden_layers)
    )
    if not interval or config.layer_types != expected or config.mlp_only_layers:
        raise UnsupportedModelError(f"{checkpoint.folder}: this order of layers can't be written as GGUF")
    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q4_0": "MOSTLY_Q4_0", "q4_1": "MOSTLY_Q4_1"}
    pairs = config.rotary_dim // 2
    third = pairs // 3
    writer.add_name(checkpoint.folder.name)
    writer.add_file_type(gguf.LlamaFileType[file_types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections([pairs - 2 * third, third, third, 0])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(interval)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    add_vocabulary(writer, gguf, checkpoint)


def _target(weight: Weight, reader: _Reader) -> _Target | None:
    """Return the place of a weight in GGUF; None for the MTP head, which a file of the trunk lacks."""
    name = weight.name
    if name.startswith("mtp."):
        return None
    shift = reader.shifted
    ends = {"embed_tokens": "token_embd.weight", "lm_head": "output.weight"}
    if name in ends:
        return _Target(ends[name])
    if name == "norm":
        return _Target("output_norm.weight", plain=shift)
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match:
        block, part = f"blk.{match[1]}.", match[2]
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
        if part in norms:
            return _Target(f"{block}{norms[part]}.weight", plain=shift)
        module, _, leaf = part.partition(".")
        if module == "self_attn" and leaf in ("q_norm", "k_norm"):
            return _Target(f"{block}attn_{leaf}.weight", plain=shift)
        if module == "self_attn" and leaf in _ATTENTION:
            return _Target(f"{block}{_ATTENTION[leaf]}.weight")
        if module == "linear_attn" and leaf in _DELTA_NET:
            return _delta_net_target(block, leaf, reader)
        if module == "mlp" and (target := _feed_forward_target(block, leaf)):
            return target
    raise UnsupportedModelError(
        f"{weight.source}: has no place in GGUF; the exporter reads checkpoints in MLX's layout"
    )


def _delta_net_target(block: str, leaf: str, reader: _Reader) -> _Target:
    """llama.cpp keeps value heads key-head last: value head j of key head i is at j * key heads + i."""
    config = reader.config
    keys = config.linear_num_key_heads
    ratio = config.linear_num_value_heads // keys

    def tiled(size: int) -> Index:
        order: Index = np.arange(keys * ratio * size).reshape(keys, ratio, size).swapaxes(0, 1).reshape(-1)
        return order

    head, width = tiled(1), config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim
    channels = np.concatenate([np.arange(before), before + tiled(width)])
    name = f"{block}{_DELTA_NET[leaf]}"
    if leaf == "A_log":
        return _Target(name, rows=head, plain=lambda values: -np.exp(values))
    if leaf == "dt_bias":
        return _Target(f"{name}.bias", rows=head, plain=_unchanged)
    if leaf == "norm":
        return _Target(f"{name}.weight", plain=_unchanged)
    if leaf == "conv1d":
        taps = config.linear_conv_kernel_dim
        return _Target(f"{name}.weight", rows=channels, plain=lambda values: values.reshape(-1, taps))
    if leaf == "out_proj":
        return _Target(f"{name}.weight", columns=tiled(width))
    rows = {"in_proj_qkv": channels, "in_proj_z": tiled(width)}.get(leaf, head)
    return _Target(f"{name}.weight", rows=rows)


def _feed_forward_target(block: str, leaf: str) -> _Target | None:
    if leaf == "gate":
        return _Target(f"{block}ffn_gate_inp.weight", plain=_unchanged)
    if leaf == "shared_expert_gate":
        return _Target(f"{block}ffn_gate_inp_shexp.weight", plain=lambda values: values.reshape(-1))
    match = re.fullmatch(r"(experts\.|shared_expert\.|)(gate|up|down)_proj", leaf)
    suffix = {"experts.": "_exps", "shared_expert.": "_shexp", "": ""}
    return _Target(f"{block}ffn_{match[2]}{suffix[match[1]]}.weight") if match else None


def _unchanged(values: Floats) -> Floats:
    return values


def _type_for(weight: Weight, kind: GgufType, reader: _Reader) -> str:
    """Return the GGUF type of a matrix."""
    if kind in ("f32", "f16"):
        return kind.upper()
    form = weight.quantization
    if form is None or weight.shape[-1] % _BLOCK:
        return "F16"
    if form.mode != "affine" or form.bits != 4:
        return "Q8_0"
    return "Q4_0" if kind == "q4_0" and reader.is_symmetric(weight) else "Q4_1"


class _Reader:
    """Reads a checkpoint's weights from its mapped files and encodes them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._files = [np.memmap(path, np.uint8, "r") for path in checkpoint.files]

    def shifted(self, values: Floats) -> Floats:
        """Norms of unconverted checkpoints are stored as w - 1."""
        return values + 1 if self.config.norm_shift else values

    def is_symmetric(self, weight: Weight) -> bool:
        """Tell whether Q4_0 holds the weight exactly: every bias is -8 scale, every scale fits fp16."""
        scales, biases = self._parts(weight)
        return bool(np.array_equal(biases, -8 * scales) and np.array_equal(_fp16(scales), scales))

    def plain(self, weight: Weight, target: _Target) -> Floats:
        """Return the values of a small tensor, as GGUF has them."""
        assert target.plain is not None
        values = target.plain(np.concatenate(list(self._values(weight))).reshape(weight.shape))
        return np.ascontiguousarray(values if target.rows is None else values[target.rows])

    def encode(self, weight: Weight, target: _Target, type_name: str) -> NDArray[Any]:
        """Return a tensor's data in a GGUF type, [..., bytes of a row] for quantised ones."""
        if target.plain is not None:
            return self.plain(weight, target)
        if type_name in ("Q4_0", "Q4_1"):
            rows = list(self._repacked(weight, target, with_minimum=type_name == "Q4_1"))
        else:
            rows = [_convert(values, type_name) for values in self._ordered_values(weight, target)]
        return np.concatenate(rows).reshape(*weight.shape[:-1], -1)

    def _repacked(
        self, weight: Weight, target: _Target, *, with_minimum: bool
    ) -> Iterator[NDArray[np.uint8]]:
        """Blocks of 32: fp16 scale, fp16 minimum (Q4_1), then 16 bytes, value i low and value i + 16 high."""
        assert weight.quantization is not None
        words = self._array(weight.data).reshape(-1, weight.data.shape[-1])
        per_block = weight.quantization.group_size // _BLOCK
        scales, biases = (np.repeat(part, per_block, -1) for part in self._parts(weight))
        for chunk in self._row_chunks(weight, target):
            packed = words[chunk].view(np.uint8)
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, _BLOCK)
            scale, minimum = scales[chunk], biases[chunk]
            if target.columns is not None:
                blocks = target.columns[::_BLOCK] // _BLOCK
                codes, scale, minimum = codes[:, blocks], scale[:, blocks], minimum[:, blocks]
            parts = [scale.astype(np.float16)[..., None].view(np.uint8)]
            if with_minimum:
                parts.append(minimum.astype(np.float16)[..., None].view(np.uint8))
            half = _BLOCK // 2
            parts.append(codes[..., :half] | codes[..., half:] << 4)
            yield np.concatenate(parts, -1).reshape(len(packed), -1)

    def _ordered_values(self, weight: Weight, target: _Target) -> Iterator[Floats]:
        for values in self._values(weight, target):
            yield values if target.columns is None else values[:, target.columns]

    def _values(self, weight: Weight, target: _Target | None = None) -> Iterator[Floats]:
        """Rows of the weight in fp32, in the target's order."""
        form = weight.quantization
        data = self._array(weight.data).reshape(-1, weight.data.shape[-1])
        if form is None:
            for chunk in self._row_chunks(weight, target):
                yield _to_fp32(data[chunk], weight.data.dtype)
            return
        if form.mode != "affine":
            raise UnsupportedModelError(f"{weight.source}: {form} can't be exported, only affine weights")
        scales, biases = self._parts(weight)
        for chunk in self._row_chunks(weight, target):
            codes = _unpack(data[chunk], form.bits).reshape(-1, scales.shape[-1], form.group_size)
            yield (codes * scales[chunk][..., None] + biases[chunk][..., None]).reshape(len(codes), -1)

    def _row_chunks(self, weight: Weight, target: _Target | None) -> Iterator[Index]:
        rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
        order = np.arange(rows) if target is None or target.rows is None or target.plain else target.rows
        step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
        for start in range(0, rows, step):
            yield order[start : start + step]

    def _parts(self, weight: Weight) -> tuple[Floats, Floats]:
        """Scales and biases, [rows, groups] in fp32."""
        assert weight.scales is not None
        assert weight.biases is not None
        scales, biases = (
            _to_fp32(self._array(part), part.dtype).reshape(-1, part.shape[-1])
            for part in (weight.scales, weight.biases)
        )
        return scales, biases

    def _array(self, part: TensorSlice) -> NDArray[Any]:
        dtypes = {"U32": np.uint32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}
        raw = self._files[part.file][part.offset : part.offset + part.nbytes]
        # A header of any length may leave tensors at odd addresses.
        aligned = raw if raw.ctypes.data % 4 == 0 else np.array(raw)
        return aligned.view(dtypes[part.dtype]).reshape(part.shape)


def _to_fp32(values: NDArray[Any], dtype: str) -> Floats:
    return from_bf16(values) if dtype == "BF16" else values.astype(np.float32)


def _fp16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _unpack(words: NDArray[np.uint32], bits: int) -> Floats:
    """Codes [rows, n] from words [rows, n * bits / 32]: one little-endian bit stream a row."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    codes: Floats
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (raw[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(words), -1)
        return codes.astype(np.float32)
    stream = np.unpackbits(raw, axis=-1, bitorder="little").reshape(len(words), -1, bits)
    codes = stream.astype(np.float32) @ (1 << np.arange(bits)).astype(np.float32)
    return codes


def _convert(values: Floats, type_name: str) -> NDArray[Any]:
    if type_name == "F32":
        return values
    if type_name == "F16":
        return values.astype(np.float16)
    gguf = require("gguf")
    packed: NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    return packed
