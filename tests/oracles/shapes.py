"""Sizes of the tiny random models: one `Shape` per property of the family that has to be covered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of one model of the family; `experts=0` makes it dense.

    Widths that reach a quantised tensor's last axis are multiples of 64, most of them of 128.
    """

    hidden: int = 128
    layers: int = 4
    interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    gdn_dim: int = 32
    conv: int = 4
    experts: int = 8
    top_k: int = 2
    moe_width: int = 128
    shared_width: int = 128
    dense_width: int = 256
    vocab: int = 320
    tied: bool = False
    rope_theta: float = 10_000_000.0
    rotary_factor: float = 0.25
    eps: float = 1e-6
    positions: int = 4096

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the query, key and value channels side by side."""
        return (2 * self.key_heads + self.value_heads) * self.gdn_dim

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` is a gated-attention layer rather than a gated-delta-net layer."""
        return (layer + 1) % self.interval == 0

    def text_config(self, model_type: str) -> dict[str, Any]:
        """The `text_config` block of a Qwen3.5/3.6 `config.json`."""
        pairs = int(self.head_dim * self.rotary_factor) // 2
        third = pairs // 3
        config: dict[str, Any] = {
            "model_type": model_type,
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "full_attention_interval": self.interval,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "layer_types": [
                "full_attention" if self.is_attention(i) else "linear_attention" for i in range(self.layers)
            ],
            "linear_conv_kernel_dim": self.conv,
            "linear_key_head_dim": self.gdn_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.gdn_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": self.positions,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "partial_rotary_factor": self.rotary_factor,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_factor,
                "mrope_interleaved": True,
                "mrope_section": [pairs - 2 * third, third, third],
            },
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "vocab_size": self.vocab,
        }
        if self.is_moe:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.moe_width,
                "shared_expert_intermediate_size": self.shared_width,
                "mlp_only_layers": [],
                "output_router_logits": False,
                "router_aux_loss_coef": 0.001,
            }
        else:
            config["intermediate_size"] = self.dense_width
        return config

    def next_config(self) -> dict[str, Any]:
        """The flat `config.json` fields of Qwen3-Next."""
        text = self.text_config("qwen3_next")
        rope = text.pop("rope_parameters")
        for name in ("attn_output_gate", "mamba_ssm_dtype"):
            del text[name]
        return text | {
            "decoder_sparse_step": 1,
            "intermediate_size": self.dense_width,
            "norm_topk_prob": True,
            "rope_scaling": None,
            "rope_theta": rope["rope_theta"],
        }


_MOE = Shape()
_DENSE = Shape(experts=0, tied=True)

SHAPES: dict[str, Shape] = {
    "moe": replace(_MOE, layers=8),
    "moe_tied": replace(_MOE, tied=True),
    "dense": _DENSE,
    "dense_untied": replace(_DENSE, tied=False, layers=8),
    # value heads per key head of the gated delta net; 3 also makes the value width 192, no multiple of 128
    "gdn_ratio1": replace(_MOE, key_heads=4, value_heads=4),
    "gdn_ratio2": replace(_MOE, key_heads=2, value_heads=4),
    "gdn_ratio3": replace(_DENSE, key_heads=2, value_heads=6),
    "gdn_ratio4": replace(_MOE, key_heads=2, value_heads=8),
    # experts chosen per token
    "top1": replace(_MOE, top_k=1),
    "top3": replace(_MOE, top_k=3),
    "top4": replace(_MOE, experts=16, top_k=4, moe_width=64),
    "top6": replace(_MOE, experts=12, top_k=6, moe_width=64),
    "top8": replace(_MOE, experts=16, top_k=8, moe_width=64),
    "top_all": replace(_MOE, experts=8, top_k=8, moe_width=64),
    # query heads per key/value head
    "kv_ratio1": replace(_DENSE, heads=2, kv_heads=2),
    "kv_ratio4": replace(_DENSE, heads=4, kv_heads=1),
    "kv_ratio6": replace(_DENSE, heads=6, kv_heads=1),
    "kv_ratio8": replace(_MOE, heads=8, kv_heads=1),
    # the family's own head sizes: attention 256 with 64 rotary dimensions, gated delta net 128
    "head256": replace(_MOE, heads=2, kv_heads=1, head_dim=256),
    "family_heads": replace(
        _DENSE, heads=2, kv_heads=1, head_dim=256, key_heads=1, value_heads=2, gdn_dim=128
    ),
    # widths that are multiples of 64 or 128 but of no larger power of two, and a vocabulary that is prime
    "odd": replace(
        _MOE, hidden=384, moe_width=192, shared_width=320, key_heads=2, value_heads=6, gdn_dim=64, vocab=331
    ),
    "odd_dense": replace(_DENSE, hidden=640, dense_width=576, heads=6, kv_heads=3, vocab=307),
    # every second layer is attention
    "interval2": replace(_DENSE, interval=2),
}
