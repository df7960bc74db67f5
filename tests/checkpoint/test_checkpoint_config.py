"""`config.json`: the family's shapes are read, everything else is refused with the field named."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from checkpoint_builders import TEXT_CONFIG, config

from lily_py.checkpoint import SUPPORTED_MODEL_TYPES
from lily_py.checkpoint.config import parse_config
from lily_py.errors import CheckpointError, UnsupportedModelError

QWEN36_35B_A3B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "attention_bias": False,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248044,
        "bos_token_id": 248044,
        "pad_token_id": None,
    },
}


def test_the_published_configuration_is_read() -> None:
    model = parse_config(QWEN36_35B_A3B, "config.json")
    assert model.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert model.layer_types.count("full_attention") == 10
    assert (model.rotary_dim, model.rope_theta) == (64, 1e7)
    assert (model.num_experts, model.num_experts_per_tok, model.intermediate_size) == (256, 8, 0)
    assert model.norm_topk_prob is True
    assert model.eos_token_ids == (248044,)
    assert all(model.is_moe_layer(layer) for layer in range(40))


def test_a_dense_tied_model_is_read() -> None:
    model = parse_config(
        config(
            model_type="qwen3_5_text",
            num_experts=...,
            num_experts_per_tok=...,
            moe_intermediate_size=...,
            intermediate_size=160,
            tie_word_embeddings=True,
            output_gate_type="swish",
        )
        | {"model_type": "qwen3_5"},
        "config.json",
    )
    assert (model.num_experts, model.intermediate_size, model.tie_word_embeddings) == (0, 160, True)
    assert not model.is_moe_layer(0)


def test_a_flat_qwen3_next_configuration_is_read() -> None:
    flat = {k: v for k, v in TEXT_CONFIG.items() if k not in ("layer_types", "rope_parameters")}
    flat |= {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "rope_theta": 5000000,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "intermediate_size": 96,
    }
    model = parse_config(flat, "config.json")
    assert model.layer_types == ("linear_attention", "full_attention")
    assert (model.rotary_dim, model.rope_theta) == (16, 5e6)
    assert [model.is_moe_layer(layer) for layer in range(2)] == [True, False]
    assert model.intermediate_size == 96


def test_sparse_steps_make_the_layers_between_dense() -> None:
    model = parse_config(config(decoder_sparse_step=2, intermediate_size=96), "config.json")
    assert model.mlp_only_layers == (0,), "every second layer has experts, counted from one"


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "qwen4_exp", "qwen3_vl"])
def test_other_architectures_are_named_with_the_supported_ones(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_config({"model_type": model_type}, "config.json")
    assert repr(model_type) in str(error.value)
    for supported in SUPPORTED_MODEL_TYPES:
        assert supported in str(error.value)


def test_an_mtp_sidecar_as_the_model_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="mtp="):
        parse_config({"model_type": "qwen3_5_mtp", "text_config": TEXT_CONFIG}, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("output_gate_type", "sigmoid"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}),
        ("layer_types", ["linear_attention", "sliding_attention"]),
    ],
)
def test_variants_that_compute_something_else_are_refused(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"isn't supported"):
        parse_config(config(**{key: value}), "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", "248320"),
        ("vocab_size", 1e5),
        ("vocab_size", True),
        ("vocab_size", 1 << 40),
        ("hidden_size", -64),
        ("hidden_size", [64]),
        ("num_hidden_layers", 10**9),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("layer_types", [None, {}]),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 0),
        ("linear_num_value_heads", 5),
        ("head_dim", 0),
        ("linear_conv_kernel_dim", 1),
        ("num_experts_per_tok", 5),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", None),
        ("mlp_only_layers", [2]),
        ("mlp_only_layers", "none"),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-6"),
        ("rope_parameters", {"rope_theta": math.nan}),
        ("rope_parameters", {}),
        ("rope_parameters", {"rope_theta": 1e7, "partial_rotary_factor": 1.5}),
        ("rope_parameters", {"rope_theta": 1e7, "partial_rotary_factor": 0.1}),
        ("rope_parameters", [1e7]),
        ("tie_word_embeddings", "false"),
        ("max_position_embeddings", 0),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, -2]),
        ("eos_token_id", [[1]]),
        ("mtp_num_hidden_layers", -1),
    ],
)
def test_impossible_values_are_refused_with_the_field_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_config(config(**{key: value}), "/models/x/config.json")
    message = str(error.value)
    assert message.startswith("/models/x/config.json")
    field = key if key != "rope_parameters" else "r"
    assert field in message


OPTIONAL = {
    "eos_token_id",
    "hidden_act",
    "model_type",
    "mtp_num_hidden_layers",
    "rope_parameters",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
}


@pytest.mark.parametrize("key", sorted(set(TEXT_CONFIG) - OPTIONAL))
def test_missing_fields_are_named(key: str) -> None:
    named = "full_attention_interval" if key == "layer_types" else key
    with pytest.raises(CheckpointError, match=f"{named} is missing"):
        parse_config(config(**{key: ...}), "config.json")


def test_the_callers_configuration_is_left_alone() -> None:
    before = copy.deepcopy(QWEN36_35B_A3B)
    parse_config(QWEN36_35B_A3B, "config.json")
    assert before == QWEN36_35B_A3B
