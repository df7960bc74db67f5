"""Tiny checkpoints on disk, written byte by byte so that every layout of the field can be had."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = 64
VOCAB = 96
KERNEL = 4
EXPERTS = 4

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": KERNEL,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "mtp_num_hidden_layers": 1,
}

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": TEXT_CONFIG,
}

NUMPY_DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}

Tensors = dict[str, tuple[str, np.ndarray]]


def config(**text: Any) -> dict[str, Any]:
    """Return a nested configuration with changes in its text part; a value of ... removes the key."""
    result = copy.deepcopy(CONFIG)
    for key, value in text.items():
        if value is ...:
            result["text_config"].pop(key, None)
        else:
            result["text_config"][key] = value
    return result


def header_bytes(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    """Return (header, data) of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def write_file(path: Path, tensors: Tensors) -> Path:
    header, data = header_bytes(tensors)
    return write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def plain(*shape: int, dtype: str = "BF16", seed: int = 0) -> tuple[str, np.ndarray]:
    """Return a tensor of the shape; its values don't matter here, but they differ by seed."""
    rng = np.random.default_rng((seed, *shape))
    if dtype in ("F16", "F32"):
        return dtype, rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
    return dtype, rng.integers(0, 1 << 8, shape).astype(NUMPY_DTYPES[dtype])


def quantised(name: str, *shape: int, bits: int = 4, group: int = 32, mode: str = "affine") -> Tensors:
    """Return the parts of a quantised weight of logical shape [..., out, in]."""
    *rows, inputs = shape
    scales = (*rows, inputs // group)
    tensors = {f"{name}.weight": plain(*rows, inputs * bits // 32, dtype="U32")}
    if mode == "affine":
        tensors[f"{name}.scales"] = plain(*scales)
        tensors[f"{name}.biases"] = plain(*scales, seed=1)
    else:
        tensors[f"{name}.scales"] = plain(*scales, dtype="U8")
    return tensors


def linear_layer(prefix: str, raw: bool) -> Tensors:
    """Return a GDN layer's mixer; `raw` has the convolution as Hugging Face stores it."""
    p = f"{prefix}.linear_attn"
    return {
        f"{p}.in_proj_qkv.weight": plain(128, HIDDEN),
        f"{p}.in_proj_z.weight": plain(64, HIDDEN),
        f"{p}.in_proj_a.weight": plain(4, HIDDEN),
        f"{p}.in_proj_b.weight": plain(4, HIDDEN),
        f"{p}.conv1d.weight": plain(128, 1, KERNEL) if raw else plain(128, KERNEL, 1),
        f"{p}.A_log": plain(4, dtype="F32"),
        f"{p}.dt_bias": plain(4),
        f"{p}.norm.weight": plain(16),
        f"{p}.out_proj.weight": plain(HIDDEN, 64),
    }


def attention_layer(prefix: str) -> Tensors:
    p = f"{prefix}.self_attn"
    return {
        f"{p}.q_proj.weight": plain(256, HIDDEN),
        f"{p}.k_proj.weight": plain(64, HIDDEN),
        f"{p}.v_proj.weight": plain(64, HIDDEN),
        f"{p}.o_proj.weight": plain(HIDDEN, 128),
        f"{p}.q_norm.weight": plain(32),
        f"{p}.k_norm.weight": plain(32),
    }


def experts(prefix: str, form: str) -> Tensors:
    """Return a mixture's tensors: experts `fused` (raw), `per_expert` (transformers), `stacked` (MLX)."""
    p = f"{prefix}.mlp"
    tensors = {
        f"{p}.gate.weight": plain(EXPERTS, HIDDEN),
        f"{p}.shared_expert_gate.weight": plain(1, HIDDEN),
        f"{p}.shared_expert.gate_proj.weight": plain(32, HIDDEN),
        f"{p}.shared_expert.up_proj.weight": plain(32, HIDDEN),
        f"{p}.shared_expert.down_proj.weight": plain(HIDDEN, 32),
    }
    if form == "fused":
        tensors[f"{p}.experts.gate_up_proj"] = plain(EXPERTS, 64, HIDDEN)
        tensors[f"{p}.experts.down_proj"] = plain(EXPERTS, HIDDEN, 32)
    elif form == "stacked":
        for name, shape in (("gate", (32, HIDDEN)), ("up", (32, HIDDEN)), ("down", (HIDDEN, 32))):
            tensors[f"{p}.switch_mlp.{name}_proj.weight"] = plain(EXPERTS, *shape)
    else:
        for expert in range(EXPERTS):
            for name, shape in (("gate", (32, HIDDEN)), ("up", (32, HIDDEN)), ("down", (HIDDEN, 32))):
                tensors[f"{p}.experts.{expert}.{name}_proj.weight"] = plain(*shape)
    return tensors


def norms(prefix: str) -> Tensors:
    return {
        f"{prefix}.input_layernorm.weight": plain(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": plain(HIDDEN),
    }


def trunk(raw: bool, head: bool = True) -> Tensors:
    """Return a whole two-layer model: `raw` as Hugging Face names and lays it out, else as MLX does."""
    body = "model.language_model" if raw else "language_model.model"
    form = "fused" if raw else "stacked"
    tensors = {f"{body}.embed_tokens.weight": plain(VOCAB, HIDDEN), f"{body}.norm.weight": plain(HIDDEN)}
    for layer in range(2):
        p = f"{body}.layers.{layer}"
        mixer = attention_layer(p) if layer else linear_layer(p, raw)
        tensors |= norms(p) | mixer | experts(p, form)
    if head:
        tensors["lm_head.weight" if raw else "language_model.lm_head.weight"] = plain(VOCAB, HIDDEN)
    return tensors


def mtp_head(prefix: str = "mtp.", form: str = "fused") -> Tensors:
    p = f"{prefix}layers.0"
    return {
        f"{prefix}fc.weight": plain(HIDDEN, 2 * HIDDEN),
        f"{prefix}norm.weight": plain(HIDDEN),
        f"{prefix}pre_fc_norm_embedding.weight": plain(HIDDEN),
        f"{prefix}pre_fc_norm_hidden.weight": plain(HIDDEN),
        **norms(p),
        **attention_layer(p),
        **experts(p, form),
    }


def write_checkpoint(
    folder: Path,
    tensors: Tensors,
    configuration: dict[str, Any] | None = None,
    shards: dict[str, list[str]] | None = None,
) -> Path:
    """Write a folder: one file, or an index with `shards` (file name -> names of tensors)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if configuration is None else configuration))
    if shards is None:
        write_file(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for file, names in shards.items():
        write_file(folder / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
