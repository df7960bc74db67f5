"""The shape of a model: `config.json` of the Qwen3.5/3.6/3.8 and Qwen3-Next hybrids, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from lily_py.checkpoint.fields import Fields
from lily_py.errors import CheckpointError, UnsupportedModelError

LayerType = Literal["linear_attention", "full_attention"]

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
MTP_SIDECAR_MODEL_TYPE = "qwen3_5_mtp"

_MAX_WIDTH = 1 << 20
_MAX_VOCABULARY = 1 << 24
_MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the graph needs to know of a model; field names are those of Hugging Face.

    Attributes:
        model_type: as the checkpoint says, such as ``qwen3_5_moe``.
        layer_types: one entry a layer; ``linear_attention`` is a gated delta net (GDN).
        rotary_dim: leading dimensions of a head that are rotated (``partial_rotary_factor * head_dim``).
        num_experts: 0 for a dense model.
        shared_expert_intermediate_size: 0 if there is no shared expert.
        intermediate_size: width of dense feed-forward layers; 0 if every layer is a mixture of experts.
        mlp_only_layers: layers of a mixture model that are dense nevertheless.
        norm_shift: stored RMSNorm weights are zero-centred, so the norm multiplies by 1 + w
            (all but ``linear_attn.norm``). Decided from the layout of the convolutions, never from values.
        eos_token_ids: tokens that end a turn, in order of first mention.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    intermediate_size: int
    mlp_only_layers: tuple[int, ...]
    norm_topk_prob: bool
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_num_hidden_layers: int
    norm_shift: bool
    eos_token_ids: tuple[int, ...]

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer's feed-forward part is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.mlp_only_layers


def parse_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Check a `config.json` (nested under ``text_config`` or flat) and return the model's shape.

    `norm_shift` is left false: the tensors decide it, not the configuration.

    Args:
        config: the JSON object.
        where: its path, for errors.

    Raises:
        UnsupportedModelError: a model type or a variant that lily doesn't run.
        CheckpointError: a field is missing, of a wrong type, out of range or in contradiction to another.
    """
    outer = Fields(config, where)
    model_type = _model_type(outer)
    text = outer.mapping("text_config") if outer.has("text_config") else outer
    if text.has("model_type"):
        _model_type(text)
    _refuse_variants(text)

    layers = text.integer("num_hidden_layers", 1, _MAX_LAYERS)
    layer_types = _layer_types(text, layers)
    heads, kv_heads = _heads(text, "num_attention_heads", "num_key_value_heads")
    value_heads, key_heads = _heads(text, "linear_num_value_heads", "linear_num_key_heads")
    head_dim = text.integer("head_dim", 2, 4096)
    rotary_dim, rope_theta = _rope(text, head_dim)

    is_moe = "moe" in model_type or model_type == "qwen3_next" or text.has("num_experts")
    experts = text.integer("num_experts", 0, 1 << 16) if is_moe else 0
    top_k = text.integer("num_experts_per_tok", 1, 1 << 16) if experts else 0
    if top_k > experts:
        raise text.error("num_experts_per_tok", f"at most num_experts = {experts}")
    dense_layers = _dense_layers(text, layers) if experts else ()
    has_dense_layers = not experts or bool(dense_layers)

    tied_from = text if text.has("tie_word_embeddings") else outer
    vocab_size = text.integer("vocab_size", 1, _MAX_VOCABULARY)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", 1, _MAX_WIDTH),
        num_hidden_layers=layers,
        layer_types=layer_types,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=text.integer("linear_key_head_dim", 1, 4096),
        linear_value_head_dim=text.integer("linear_value_head_dim", 1, 4096),
        # A kernel of width 1 would make [C, 1, K] and [C, K, 1] the same shape.
        linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim", 2, 64),
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=text.integer("moe_intermediate_size", 1, _MAX_WIDTH) if experts else 0,
        shared_expert_intermediate_size=(
            text.integer("shared_expert_intermediate_size", 0, _MAX_WIDTH, default=0) if experts else 0
        ),
        intermediate_size=text.integer("intermediate_size", 1, _MAX_WIDTH) if has_dense_layers else 0,
        mlp_only_layers=dense_layers,
        norm_topk_prob=text.boolean("norm_topk_prob", default=True),
        rms_norm_eps=text.number("rms_norm_eps", 1e-12, 0.1),
        tie_word_embeddings=tied_from.boolean("tie_word_embeddings", default=False),
        max_position_embeddings=text.integer("max_position_embeddings", 1, 1 << 30),
        mtp_num_hidden_layers=text.integer("mtp_num_hidden_layers", 0, 16, default=0),
        norm_shift=False,
        eos_token_ids=end_tokens(vocab_size, outer, text),
    )


def end_tokens(vocab_size: int, *sources: Fields) -> tuple[int, ...]:
    """Return the union of ``eos_token_id`` over several files, in order of first mention.

    Ids beyond the vocabulary (inherited defaults of a cut-down model) can never be sampled and are left out.
    """
    found: dict[int, None] = {}
    for source in sources:
        for token in source.integers("eos_token_id", 0, (1 << 31) - 1):
            if token < vocab_size:
                found[token] = None
    return tuple(found)


def _model_type(fields: Fields) -> str:
    model_type = fields.text("model_type")
    if model_type == MTP_SIDECAR_MODEL_TYPE:
        raise CheckpointError(
            f"{fields.where}: this is an MTP sidecar (model_type {MTP_SIDECAR_MODEL_TYPE}), not a whole "
            "model; open the base model and pass this one as mtp="
        )
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{fields.where}: model_type {model_type!r} isn't supported; lily runs "
            + ", ".join(SUPPORTED_MODEL_TYPES)
        )
    return model_type


def _refuse_variants(text: Fields) -> None:
    """Refuse what would silently compute another function than the graph's."""
    activation = text.text("hidden_act", default="silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{text.where}: hidden_act {activation!r} isn't supported, only 'silu'")
    gate = text.text("output_gate_type", default="swish")
    if gate not in ("swish", "silu"):
        raise UnsupportedModelError(
            f"{text.where}: output_gate_type {gate!r} isn't supported, only 'swish' (the same as 'silu')"
        )
    if text.boolean("attention_bias", default=False):
        raise UnsupportedModelError(f"{text.where}: attention_bias true isn't supported")
    if not text.boolean("attn_output_gate", default=True):
        raise UnsupportedModelError(f"{text.where}: attn_output_gate false isn't supported")


def _heads(text: Fields, many: str, few: str) -> tuple[int, int]:
    """Read two head counts of which the first must be a multiple of the second."""
    count = text.integer(many, 1, 4096)
    groups = text.integer(few, 1, 4096)
    if count % groups:
        raise text.error(many, f"a multiple of {few} = {groups}")
    return count, groups


def _layer_types(text: Fields, layers: int) -> tuple[LayerType, ...]:
    if not text.has("layer_types"):
        interval = text.integer("full_attention_interval", 1, _MAX_LAYERS)
        return tuple(
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)
        )
    types = text.values["layer_types"]
    if not isinstance(types, list) or len(types) != layers:
        raise text.error("layer_types", f"a list of num_hidden_layers = {layers} entries")
    for name in types:
        if name not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(
                f"{text.where}: layer_types: {name!r} isn't supported, only 'linear_attention' and "
                "'full_attention'"
            )
    return cast("tuple[LayerType, ...]", tuple(types))


def _rope(text: Fields, head_dim: int) -> tuple[int, float]:
    """Return (rotated dimensions of a head, base frequency)."""
    rope = text.mapping("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    for key in ("rope_type", "type"):
        kind = rope.text(key, default="default")
        if kind != "default":
            raise UnsupportedModelError(f"{rope.where}: {key} {kind!r} isn't supported, only 'default'")
    theta = (rope if rope.has("rope_theta") else text).number("rope_theta", 1.0, 1e12)
    partial = rope if rope.has("partial_rotary_factor") else text
    factor = partial.number("partial_rotary_factor", 0.0, 1.0, default=0.25)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"{partial.where}: partial_rotary_factor {factor:g} of head_dim {head_dim} rotates {rotary_dim} "
            "dimensions; it must be an even number of at least 2"
        )
    return rotary_dim, theta


def _dense_layers(text: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without experts: those listed, and those that ``decoder_sparse_step`` skips."""
    listed = set(text.integers("mlp_only_layers", 0, layers - 1))
    step = text.integer("decoder_sparse_step", 1, _MAX_LAYERS, default=1)
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
