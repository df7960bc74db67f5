"""Writes tiny random checkpoints in every layout the family is published in.

`build(folder, "moe", "mlx-4bit-g64")` writes a folder that lily, mlx-lm and `Reference` load alike. The
numbers depend on the shape, the seed and the tensor's name only, so two formats of a shape hold one model.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oracles import tensorfile, textfiles
from oracles.shapes import SHAPES, Shape
from oracles.tensorfile import Array

FLOATS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Quant:
    """How one tensor is quantised: `mode` affine, mxfp4, mxfp8 or nvfp4; `group` values share a scale."""

    bits: int
    group: int
    mode: str = "affine"


FLOAT_MODES = {"mxfp4": Quant(4, 32, "mxfp4"), "mxfp8": Quant(8, 32, "mxfp8"), "nvfp4": Quant(4, 16, "nvfp4")}
ROUTER = Quant(8, 64)  # what mlx-lm gives the routers whatever the rest has
Overrides = Sequence[tuple[str, "Quant | None"]]
MIXED: Overrides = (
    ("*.mlp.gate", None),
    ("*.mlp.switch_mlp.*", FLOAT_MODES["mxfp4"]),
    ("*.in_proj_qkv", Quant(6, 32)),
    ("*.in_proj_z", Quant(3, 64)),
    ("*.in_proj_a", Quant(8, 32)),
    ("*.linear_attn.out_proj", None),
    ("*.q_proj", Quant(5, 32)),
    ("*.k_proj", FLOAT_MODES["nvfp4"]),
    ("*.v_proj", FLOAT_MODES["mxfp8"]),
    ("*.o_proj", Quant(2, 32)),
    ("*.mlp.*up_proj", Quant(8, 128)),
    ("embed_tokens", Quant(6, 128)),
    ("lm_head", Quant(8, 64)),
)

# Standard deviations times the square root of the width; 1 for tensors that match none.
_GAINS = {"mlp.gate.": 1.5, "embed_tokens": 2.0, "out_proj": 0.5, "o_proj": 0.5, "down_proj": 0.5}
_NORMS = ("_layernorm.weight", "_norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def parse_format(fmt: str) -> tuple[str, Quant | None, Overrides]:
    """The layout ("hf" or "mlx"), the default quantisation and the exceptions a format name stands for."""
    if fmt in ("hf", "mlx"):
        return fmt, None, ()
    if fmt == "mlx-mixed":
        return "mlx", Quant(4, 64), MIXED
    name = fmt.removeprefix("mlx-")
    if name in FLOAT_MODES:
        return "mlx", FLOAT_MODES[name], ()
    if match := re.fullmatch(r"(\d)bit-g(\d+)", name):
        return "mlx", Quant(int(match[1]), int(match[2])), ()
    raise ValueError(
        f"unknown checkpoint format {fmt!r}; use hf, mlx, mlx-<bits>bit-g<group>, mlx-mixed or mlx-mxfp4"
    )


def is_zero_centred(name: str) -> bool:
    """Whether the tensor is the weight of a norm that Hugging Face checkpoints store as w - 1."""
    if name.endswith("linear_attn.norm.weight"):
        return False
    return name.endswith(_NORMS) or name in ("norm.weight", "mtp.norm.weight")


def _sizes(shape: Shape, mtp: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names (without the layout's prefix) and shapes of all tensors, experts fused as in Qwen3.6."""
    h = shape.hidden
    yield "embed_tokens.weight", (shape.vocab, h)

    def layer(p: str, attention: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield p + "input_layernorm.weight", (h,)
        if attention:
            a, d = p + "self_attn.", shape.head_dim
            yield a + "q_proj.weight", (2 * shape.heads * d, h)
            yield a + "k_proj.weight", (shape.kv_heads * d, h)
            yield a + "v_proj.weight", (shape.kv_heads * d, h)
            yield a + "o_proj.weight", (h, shape.heads * d)
            yield a + "q_norm.weight", (d,)
            yield a + "k_norm.weight", (d,)
        else:
            a, values = p + "linear_attn.", shape.value_heads * shape.gdn_dim
            yield a + "in_proj_qkv.weight", (shape.conv_channels, h)
            yield a + "in_proj_z.weight", (values, h)
            yield a + "in_proj_b.weight", (shape.value_heads, h)
            yield a + "in_proj_a.weight", (shape.value_heads, h)
            yield a + "conv1d.weight", (shape.conv_channels, 1, shape.conv)
            yield a + "A_log", (shape.value_heads,)
            yield a + "dt_bias", (shape.value_heads,)
            yield a + "norm.weight", (shape.gdn_dim,)
            yield a + "out_proj.weight", (h, values)
        yield p + "post_attention_layernorm.weight", (h,)
        yield from feed_forward(p + "mlp.")

    def feed_forward(p: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        def mlp(q: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield q + "gate_proj.weight", (width, h)
            yield q + "up_proj.weight", (width, h)
            yield q + "down_proj.weight", (h, width)

        if not shape.is_moe:
            yield from mlp(p, shape.dense_width)
            return
        yield p + "gate.weight", (shape.experts, h)
        yield p + "experts.gate_up_proj", (shape.experts, 2 * shape.moe_width, h)
        yield p + "experts.down_proj", (shape.experts, h, shape.moe_width)
        yield from mlp(p + "shared_expert.", shape.shared_width)
        yield p + "shared_expert_gate.weight", (1, h)

    for i in range(shape.layers):
        yield from layer(f"layers.{i}.", shape.is_attention(i))
    yield "norm.weight", (h,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, h)
    if mtp:
        yield "mtp.fc.weight", (h, 2 * h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{name}.weight", (h,)
        yield from layer("mtp.layers.0.", True)


def _draw(name: str, size: tuple[int, ...], seed: int) -> Array:
    """Random values of one tensor in float32, scaled so that activations stay near one.

    Routers are drawn wide enough to prefer some experts clearly. Decays exp(-A softplus(a + dt_bias)) range
    from nearly one to nearly zero, so that both remembering and forgetting show in the recurrent state.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(size)
    if is_zero_centred(name):
        values = 0.15 * normal
    elif name.endswith("linear_attn.norm.weight"):
        values = 1 + 0.15 * normal
    elif name.endswith("A_log"):
        values = rng.uniform(np.log(0.02), np.log(2.0), size)
    elif name.endswith("dt_bias"):
        values = normal - 1
    elif name.endswith("conv1d.weight"):
        values = 0.5 * normal
    else:
        gain = next((g for part, g in _GAINS.items() if part in name), 1.0)
        values = gain / np.sqrt(size[-1]) * normal
    return np.asarray(values, np.float32)


def _correlate_queries_and_keys(tensors: dict[str, Array], shape: Shape) -> None:
    """Makes each gated delta net's keys resemble its queries, as training does.

    Independent ones are nearly orthogonal at some tokens; the first token's output is then a tiny multiple of
    its value, and the norm that follows magnifies rounding errors by thousands.
    """
    keys = shape.key_heads * shape.gdn_dim
    for name, values in tensors.items():
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            values[keys : 2 * keys] = 0.8 * values[:keys] + 0.6 * values[keys : 2 * keys]


def _split_experts(tensors: dict[str, Array], experts: str, only: Callable[[str], bool]) -> None:
    """Rewrites the fused expert tensors as "separate" (one per expert) or "stacked" (`switch_mlp`) ones."""
    for name in [n for n in tensors if n.endswith("experts.gate_up_proj") and only(n)]:
        prefix = name.removesuffix("experts.gate_up_proj")
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": tensors.pop(prefix + "experts.down_proj")}
        for part, values in parts.items():
            if experts == "stacked":
                tensors[f"{prefix}switch_mlp.{part}.weight"] = values
            else:
                for e, matrix in enumerate(values):
                    tensors[f"{prefix}experts.{e}.{part}.weight"] = matrix


def _fuse_next_projections(tensors: dict[str, Array], shape: Shape) -> None:
    """Qwen3-Next's projections: rows grouped by key head, each q, k, its v and its z (or its b and a)."""
    keys, per_key, d = shape.key_heads, shape.value_heads // shape.key_heads, shape.gdn_dim
    for name in [n for n in tensors if n.endswith("in_proj_qkv.weight")]:
        p = name.removesuffix("qkv.weight")
        q, k, v = np.split(tensors.pop(name), [keys * d, 2 * keys * d])
        rows = [(q, d), (k, d), (v, per_key * d), (tensors.pop(p + "z.weight"), per_key * d)]
        scalars = [(tensors.pop(p + "b.weight"), per_key), (tensors.pop(p + "a.weight"), per_key)]
        for fused, blocks in (("qkvz", rows), ("ba", scalars)):
            grouped = [block.reshape(keys, height, -1) for block, height in blocks]
            tensors[f"{p}{fused}.weight"] = np.concatenate(grouped, 1).reshape(-1, shape.hidden)


def _quantise(values: Array, quant: Quant, dtype: str) -> dict[str, Array]:
    """`weight`, `scales` (and `biases`) as mlx packs them; scales and biases of affine mode in `dtype`."""
    import mlx.core as mx

    parts = mx.quantize(
        mx.array(values).astype(getattr(mx, dtype)), group_size=quant.group, bits=quant.bits, mode=quant.mode
    )
    arrays = [np.array(p.astype(mx.float32) if p.dtype == mx.bfloat16 else p) for p in parts]
    return {
        key: array.astype(FLOATS[dtype]) if array.dtype.kind == "f" else array
        for key, array in zip(("weight", "scales", "biases"), arrays, strict=False)
    }


def _config(shape: Shape, arch: str, visual: bool) -> dict[str, Any]:
    ids = textfiles.token_ids()
    special = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    if arch == "qwen3_next":
        return {"architectures": ["Qwen3NextForCausalLM"]} | shape.next_config() | special
    name, cls = ("qwen3_5_moe", "Qwen3_5Moe") if shape.is_moe else ("qwen3_5", "Qwen3_5")
    config: dict[str, Any] = {
        "architectures": [f"{cls}ForConditionalGeneration"],
        "model_type": name,
        "tie_word_embeddings": shape.tied,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": shape.text_config(f"{name}_text") | special,
    }
    if visual:
        config["vision_config"] = {
            "model_type": name, "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
            "num_position_embeddings": 16, "out_hidden_size": shape.hidden,
        }  # fmt: skip
    return config


def _write_weights(
    folder: Path,
    tensors: dict[str, Array],
    sidecars: dict[str, dict[str, Array]],
    shards: int,
    index: bool,
    writer: str,
) -> None:
    """Writes the shards, each about as large as the others, the sidecars by file name, and the index."""
    metadata = {"format": writer}
    total = sum(array.nbytes for array in tensors.values())
    groups: list[dict[str, Array]] = [{} for _ in range(shards)]
    done = 0
    for name, array in tensors.items():
        groups[done * shards // total][name] = array
        done += array.nbytes
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        tensorfile.write(folder / file, group, metadata)
        weight_map |= dict.fromkeys(group, file)
    for file, sidecar in sidecars.items():
        tensorfile.write(folder / file, sidecar, metadata)
        weight_map |= dict.fromkeys(sidecar, file)
    if index:
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=1))


def build(
    folder: Path,
    shape: Shape | str,
    fmt: str = "mlx",
    *,
    dtype: str = "float32",
    seed: int = 0,
    arch: str = "qwen3_5",
    experts: str | None = None,
    mtp: bool | str = False,
    visual: bool = False,
    shards: int = 1,
    index: bool | None = None,
    overrides: Overrides = (),
    override_prefix: str | None = None,
) -> Path:
    """Writes a checkpoint with its tokenizer into `folder` and returns the folder.

    Args:
        shape: a `Shape` or a name in `SHAPES`.
        fmt: "hf" (raw Hugging Face: norms zero-centred, conv1d [C,1,K]), "mlx" (converted: norms +1, conv1d
            [C,K,1], `switch_mlp`), "mlx-{2,3,4,5,6,8}bit-g{32,64,128}", "mlx-mxfp4", "mlx-mxfp8", "mlx-nvfp4"
            or "mlx-mixed" (several modes and unquantised tensors in one file). A tensor whose width is no
            multiple of the group stays unquantised, as mlx-lm leaves it.
        dtype: of unquantised tensors and of affine scales; `A_log` is always float32.
        arch: "qwen3_5" or "qwen3_next" (flat config, fused projections, separate experts when raw).
        experts: "fused", "separate" or "stacked". The default is what the layout has; in the converted layout
            it concerns the MTP head alone.
        mtp: True adds the head to the model's own files; a name such as "mtp/weights.safetensors" writes it
            there, and an index names it too.
        visual: adds a vision tower's tensor and config, which a text engine skips.
        shards: how many files; `index` (default: more than one) writes model.safetensors.index.json.
        overrides: (pattern, Quant or None) by module path without prefix, e.g. ("*.q_proj", None).
        override_prefix: spelling of the paths in the quantisation block, e.g. "model.language_model.".
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    layout, default, mixed = parse_format(fmt)
    rules = [*overrides, *mixed, ("*.mlp.gate", ROUTER), ("*.mlp.shared_expert_gate", ROUTER)]
    tensors = {name: _draw(name, size, seed) for name, size in _sizes(shape, bool(mtp))}
    _correlate_queries_and_keys(tensors, shape)
    raw = layout == "hf"
    if arch == "qwen3_next":
        _fuse_next_projections(tensors, shape)
    style = experts or ("stacked" if not raw else "separate" if arch == "qwen3_next" else "fused")
    if not raw:
        _split_experts(tensors, "stacked", lambda name: not name.startswith("mtp."))
    if style != "fused":
        _split_experts(tensors, style, lambda name: True)

    trunk = {("qwen3_5", True): "model.language_model.", ("qwen3_5", False): "language_model.model."}.get(
        (arch, raw), "model."
    )

    def full_name(name: str, trunk: str = trunk) -> str:
        if name.startswith("mtp."):
            return name
        if name.startswith("lm_head"):
            return name if trunk.startswith("model.") else "language_model." + name
        return trunk + name

    quantisation: dict[str, Any] = {}
    written: dict[str, Array] = {}
    for name, drawn in tensors.items():
        values = drawn
        if not raw and name.endswith("conv1d.weight"):
            values = np.moveaxis(values, 2, 1)
        module = name.removesuffix(".weight")
        rule = next((quant for pattern, quant in rules if fnmatch(module, pattern)), default)
        matrix = name.endswith(".weight") and values.ndim > 1 and not name.endswith("conv1d.weight")
        if default and matrix and rule and values.shape[-1] % rule.group == 0:
            for key, part in _quantise(values, rule, dtype).items():
                written[full_name(f"{module}.{key}")] = part
        else:
            keep = name.endswith("A_log") or (raw and name.endswith("linear_attn.norm.weight"))
            values = values.astype(FLOATS["float32" if keep else dtype])
            if not raw and is_zero_centred(name):
                values = values + values.dtype.type(
                    1
                )  # the converter adds to the stored value, and rounds again
            written[full_name(name)] = values
        if default and matrix and rule != default:
            spec: Any = rule and {"group_size": rule.group, "bits": rule.bits}
            if rule and (rule.mode != "affine" or default.mode != "affine"):
                spec["mode"] = rule.mode
            quantisation[full_name(module, override_prefix or trunk)] = spec or False
    if visual:
        tower = "model.visual." if raw else "vision_tower."
        patches = _draw("visual", (32, 3, 2, 4, 4), seed)
        written[tower + "patch_embed.proj.weight"] = patches.astype(FLOATS[dtype])

    config = _config(shape, arch, visual)
    if default:
        base = {"group_size": default.group, "bits": default.bits, "mode": default.mode}
        config["quantization"] = config["quantization_config"] = base | quantisation
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    textfiles.write(folder)
    sidecars = {}
    if isinstance(mtp, str):
        sidecars[mtp] = {name: written.pop(name) for name in list(written) if name.startswith("mtp.")}
    indexed = shards > 1 if index is None else index
    _write_weights(folder, written, sidecars, shards, indexed, "pt" if raw else "mlx")
    return folder
