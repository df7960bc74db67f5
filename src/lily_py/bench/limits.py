"""What a token must cost, in bytes when decoded and in operations in a prompt, and the rates that allows."""

from __future__ import annotations

from dataclasses import dataclass

from lily_py.bench.roofline import Roofline
from lily_py.checkpoint import Checkpoint, ModelConfig, Weight

_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True)
class TokenCost:
    """Costs of one token of a model.

    Attributes:
        weight_bytes: codes, scales, biases and plain values that a decoded token reads once.
        state_bytes: recurrent and convolution state, read and written, fp32.
        kv_bytes: keys and values per position of context, bf16.
        multiply_adds: products of a prompt token with weight matrices, without the output head, which only
            a prompt's last token needs.
    """

    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    multiply_adds: int

    def decode_bytes(self, context: int) -> int:
        """Return the bytes that one decoded token moves after `context` tokens."""
        return self.weight_bytes + self.state_bytes + self.kv_bytes * context

    @property
    def prompt_operations(self) -> int:
        """Matrix operations per prompt token, two a multiply-add."""
        return 2 * self.multiply_adds


def token_cost(checkpoint: Checkpoint) -> TokenCost:
    """Count from the checkpoint's own tensors and formats."""
    config = checkpoint.config
    read = 0.0
    products = 0.0
    for weight in checkpoint.weights.values():
        share = _share(weight, config)
        read += share * weight.nbytes
        if len(weight.shape) >= 2 and not _is_end(weight.name) and "conv1d" not in weight.name:
            products += share * _elements(weight)
    gdn_layers = config.layer_types.count("linear_attention")
    attention_layers = config.layer_types.count("full_attention")
    matrices = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    channels = (
        2 * config.linear_num_key_heads * config.linear_key_head_dim
        + config.linear_num_value_heads * config.linear_value_head_dim
    )
    taps = config.linear_conv_kernel_dim - 1
    return TokenCost(
        weight_bytes=round(read),
        state_bytes=gdn_layers * 2 * _FP32_BYTES * (matrices + taps * channels),
        kv_bytes=attention_layers * 2 * config.num_key_value_heads * config.head_dim * _BF16_BYTES,
        multiply_adds=round(products),
    )


def _share(weight: Weight, config: ModelConfig) -> float:
    """The part of a weight that one token uses."""
    if weight.name.startswith("mtp."):
        return 0.0
    if weight.name == "embed_tokens" and not config.tie_word_embeddings:
        return 1 / config.vocab_size
    if ".mlp.experts." in weight.name:
        return config.num_experts_per_tok / config.num_experts
    return 1.0


def _is_end(name: str) -> bool:
    return name in ("embed_tokens", "lm_head")


def _elements(weight: Weight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


@dataclass(frozen=True)
class Limits:
    """Rates that the machine allows one model, in tokens per second."""

    cost: TokenCost
    roofline: Roofline
    unit: str

    def decode(self, context: int) -> float:
        """Return the sustained read bandwidth over the bytes of a decoded token."""
        return self.roofline.bandwidth / self.cost.decode_bytes(context)

    def prefill(self, context: int) -> float:
        """Return the unit's peak over the operations of a prompt token; the same for every context."""
        del context
        return self.roofline.peak(self.unit) / self.cost.prompt_operations

    def rate(self, phase: str, context: int) -> float:
        """Return the limit of a phase."""
        return self.decode(context) if phase == "decode" else self.prefill(context)
