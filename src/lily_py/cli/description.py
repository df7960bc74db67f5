"""What a checkpoint is and needs, computed from its description without loading a weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lily_py.checkpoint import Checkpoint, ModelConfig, Weight

_CACHE_BYTES = 2
"""Keys and values are stored as bfloat16 by default."""
_STATE_BYTES = 4
"""Recurrent and convolution states are float32."""

_KINDS = (
    ("mtp.", "MTP head"),
    ("embed_tokens", "embedding"),
    ("lm_head", "output head"),
    (".mlp.experts.", "experts"),
    (".mlp.shared_expert.", "shared experts"),
    (".mlp.shared_expert_gate", "routers"),
    (".mlp.gate_proj", "feed-forward"),
    (".mlp.gate", "routers"),
    (".mlp.", "feed-forward"),
    (".linear_attn.in_proj", "gated delta net"),
    (".linear_attn.out_proj", "gated delta net"),
    (".linear_attn.norm", "norms"),
    (".linear_attn.", "convolutions, decay"),
    ("norm", "norms"),
    (".self_attn.", "attention"),
)
"""Part of a canonical name -> kind of tensor; the first that fits counts."""


@dataclass(frozen=True)
class TensorGroup:
    """All weights of one kind and number format.

    Attributes:
        kind: such as ``experts``.
        format: such as ``affine 4-bit, groups of 64``, or ``BF16``.
        weights: how many.
        parameters: numbers in them.
        nbytes: bytes in the files, scales and biases included.
    """

    kind: str
    format: str
    weights: int
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits a parameter, scales and biases included."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


def tensor_groups(weights: Iterable[Weight]) -> list[TensorGroup]:
    """Return the weights grouped by kind and format, the largest group first."""
    counts: Counter[tuple[str, str]] = Counter()
    parameters: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        key = (_kind(weight.name), str(weight.quantization or weight.data.dtype))
        counts[key] += 1
        parameters[key] += math.prod(weight.shape)
        nbytes[key] += weight.nbytes
    groups = [TensorGroup(*key, counts[key], parameters[key], nbytes[key]) for key in counts]
    return sorted(groups, key=lambda group: (-group.nbytes, group.kind, group.format))


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Return the bytes of keys and values that each token of a conversation takes."""
    layers = config.layer_types.count("full_attention")
    return layers * 2 * config.num_key_value_heads * config.head_dim * _CACHE_BYTES


def recurrent_bytes(config: ModelConfig) -> int:
    """Return the bytes of recurrent and convolution states of a conversation, whatever its length."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = values * config.linear_key_head_dim
    convolution = (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    return config.layer_types.count("linear_attention") * (state + convolution) * _STATE_BYTES


def memory_per_context(checkpoint: Checkpoint) -> dict[int, int]:
    """Return context length -> bytes of weights and one conversation, from 4,096 doubling to the limit."""
    config = checkpoint.config
    lengths = [1 << i for i in range(12, 31) if 1 << i < config.max_position_embeddings]
    fixed = checkpoint.nbytes + recurrent_bytes(config)
    return {
        tokens: fixed + tokens * kv_bytes_per_token(config)
        for tokens in (*lengths, config.max_position_embeddings)
    }


def active_parameters(checkpoint: Checkpoint) -> int:
    """Return how many parameters of the trunk one token meets: of the experts only those that are chosen.

    The embedding isn't counted unless it is the output head as well, because only one row of it is read.
    """
    config = checkpoint.config
    total = 0
    for name, weight in checkpoint.weights.items():
        kind = _kind(name)
        if kind == "MTP head" or (kind == "embedding" and not config.tie_word_embeddings):
            continue
        count = math.prod(weight.shape)
        total += count * config.num_experts_per_tok // config.num_experts if kind == "experts" else count
    return total


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS if part in name), "other")
