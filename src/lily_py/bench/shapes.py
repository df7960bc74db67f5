"""Sizes of the published models of the family, and the `config.json` that goes with each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lily_py.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model; `experts` 0 makes it dense, with feed-forward layers of `dense_width`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int
    gdn_dim: int = 128
    conv: int = 4
    experts: int = 0
    top_k: int = 0
    moe_width: int = 0
    shared_width: int = 0
    dense_width: int = 0
    vocab: int = 248_320
    tied: bool = False
    interval: int = 4
    max_positions: int = 262_144

    @property
    def model_type(self) -> str:
        """As Hugging Face names it."""
        return "qwen3_5_moe" if self.experts else "qwen3_5"

    @property
    def conv_channels(self) -> int:
        """Channels of a gated delta net's convolution: queries, keys and values side by side."""
        return (2 * self.key_heads + self.value_heads) * self.gdn_dim

    def is_attention(self, layer: int) -> bool:
        """Tell whether a layer is gated attention rather than a gated delta net."""
        return (layer + 1) % self.interval == 0


_MOE_35B = ModelShape(
    hidden=2048, layers=40, heads=16, kv_heads=2, value_heads=32,
    experts=256, top_k=8, moe_width=512, shared_width=512,
)  # fmt: skip

SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(
        hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, key_heads=2, value_heads=4, gdn_dim=64,
        experts=16, top_k=4, moe_width=256, shared_width=256, vocab=4096,
    ),
    "tiny-dense": ModelShape(
        hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, key_heads=2, value_heads=4, gdn_dim=64,
        dense_width=512, vocab=4096, tied=True,
    ),
    "0.8b": ModelShape(
        hidden=1024, layers=24, heads=8, kv_heads=2, value_heads=16, dense_width=3584, tied=True
    ),
    "2b": ModelShape(
        hidden=2048, layers=24, heads=8, kv_heads=2, value_heads=16, dense_width=6144, tied=True
    ),
    "4b": ModelShape(
        hidden=2560, layers=32, heads=16, kv_heads=4, value_heads=32, dense_width=9216, tied=True
    ),
    "9b": ModelShape(hidden=4096, layers=32, heads=16, kv_heads=4, value_heads=32, dense_width=12288),
    "27b": ModelShape(hidden=5120, layers=64, heads=24, kv_heads=4, value_heads=48, dense_width=17408),
    "35b-a3b": _MOE_35B,
    "35b-a3b-slice4": replace(_MOE_35B, layers=4),
    "122b-a10b": ModelShape(
        hidden=3072, layers=48, heads=32, kv_heads=2, value_heads=64,
        experts=256, top_k=8, moe_width=1024, shared_width=1024,
    ),
    "122b-a10b-slice4": ModelShape(
        hidden=3072, layers=4, heads=32, kv_heads=2, value_heads=64,
        experts=256, top_k=8, moe_width=1024, shared_width=1024,
    ),
}  # fmt: skip
"""Sizes by name: from the `config.json` of the published checkpoints; a slice keeps the first layers."""


def find_shape(name: str) -> ModelShape:
    """Return the shape of that name.

    Raises:
        InvalidArgumentError: there is none; the message lists those there are.
    """
    if name not in SHAPES:
        raise InvalidArgumentError(f"shape {name!r} isn't known; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def model_config(shape: ModelShape, eos_token_ids: list[int], quantization: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of an mlx-community checkpoint of that shape.

    Args:
        eos_token_ids: tokens that end a turn.
        quantization: default format and exceptions, as `mlx_lm.convert` writes them.
    """
    pairs = shape.head_dim // 4 // 2
    third = pairs // 3
    text: dict[str, Any] = {
        "model_type": f"{shape.model_type}_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": eos_token_ids[-1],
        "full_attention_interval": shape.interval,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "layer_types": [
            "full_attention" if shape.is_attention(layer) else "linear_attention"
            for layer in range(shape.layers)
        ],
        "linear_conv_kernel_dim": shape.conv,
        "linear_key_head_dim": shape.gdn_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.gdn_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": shape.max_positions,
        # The published trunk comes without the head that the original's configuration counts.
        "mtp_num_hidden_layers": 0,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * third, third, third],
        },
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    if shape.experts:
        text |= {
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.moe_width,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "shared_expert_intermediate_size": shape.shared_width,
        }
    else:
        text["intermediate_size"] = shape.dense_width
    architecture = (
        "Qwen3_5MoeForConditionalGeneration" if shape.experts else "Qwen3_5ForConditionalGeneration"
    )
    return {
        "architectures": [architecture],
        "model_type": shape.model_type,
        "eos_token_id": eos_token_ids,
        "tie_word_embeddings": shape.tied,
        "text_config": text,
        "quantization": quantization,
        "quantization_config": quantization,
    }
