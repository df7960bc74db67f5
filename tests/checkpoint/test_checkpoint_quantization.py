"""Number formats: every one that MLX writes is understood; declarations that can't be are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_builders import NUMPY_DTYPES, Tensors, plain, quantised, write_file

from lily_py.checkpoint.quantization import Quantization, parse_quantization
from lily_py.checkpoint.safetensors_header import read_header
from lily_py.checkpoint.weights import build_weights
from lily_py.errors import CheckpointError, UnsupportedModelError

MLX_DTYPES = {mx.uint32: "U32", mx.uint8: "U8", mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}
FORMATS = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def _build(tmp_path: Path, tensors: Tensors, declared: dict[str, Any] | None) -> Any:
    table = parse_quantization({"quantization": declared}, "config.json")
    return build_weights(read_header(write_file(tmp_path / "w.safetensors", tensors)), lambda _: table)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_what_mlx_quantises_is_understood(
    tmp_path: Path, mode: str, bits: int, group: int, dtype: mx.Dtype
) -> None:
    logical = (3, 10, 256)
    parts = mx.quantize(mx.ones(logical, dtype), group_size=group, bits=bits, mode=mode)
    tensors: Tensors = {}
    for suffix, part in zip(("weight", "scales", "biases"), parts, strict=False):
        name = MLX_DTYPES[part.dtype]
        raw = np.array(part.view(mx.uint16) if name == "BF16" else part)
        tensors[f"x.{suffix}"] = (name, raw.astype(NUMPY_DTYPES[name]))
    weight = _build(tmp_path, tensors, {"mode": mode, "bits": bits, "group_size": group})["x"]
    assert weight.shape == logical
    assert weight.quantization == Quantization(mode, bits, group)  # type: ignore[arg-type]
    assert weight.nbytes == sum(array.nbytes for _, array in tensors.values())
    assert (weight.biases is None) == (mode != "affine")


def test_missing_fields_of_an_override_come_from_the_default_of_the_same_mode() -> None:
    table = parse_quantization(
        {
            "quantization": {
                "group_size": 128,
                "bits": 4,
                "a.b": {"bits": 6},
                "a.c": {"mode": "mxfp8"},
                "a.d": True,
            }
        },
        "config.json",
    )
    assert table.lookup("a.b") == Quantization("affine", 6, 128)
    assert table.lookup("a.c") == Quantization("mxfp8", 8, 32)
    assert table.lookup("a.d") == table.lookup("elsewhere") == Quantization("affine", 4, 128)


@pytest.mark.parametrize("place", ["quantization", "quantization_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_declaration_is_found_under_both_keys_outside_and_in_the_text_part(
    place: str, nested: bool
) -> None:
    config: dict[str, Any] = {place: {"group_size": 32, "bits": 8}}
    table = parse_quantization({"text_config": config} if nested else config, "config.json")
    assert table.default == Quantization("affine", 8, 32)


def test_an_mlx_name_of_stacked_experts_is_the_canonical_one() -> None:
    declared = {
        "group_size": 64,
        "bits": 4,
        "language_model.model.layers.7.mlp.switch_mlp.up_proj": {"bits": 8},
    }
    table = parse_quantization({"quantization": declared}, "config.json")
    assert table.lookup("layers.7.mlp.experts.up_proj") == Quantization("affine", 8, 64)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes", "modelopt"])
def test_formats_of_other_toolkits_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quant_method '{method}'.*MLX"):
        parse_quantization({"quantization_config": {"quant_method": method, "bits": 4}}, "config.json")


@pytest.mark.parametrize(
    "declared",
    [
        {"bits": 7, "group_size": 64},
        {"bits": 1, "group_size": 64},
        {"bits": 4, "group_size": 48},
        {"bits": 8, "group_size": 32, "mode": "mxfp4"},
        {"bits": 4, "group_size": 32, "mode": "nvfp4"},
        {"bits": "4"},
        {"bits": 4.0},
        {"bits": float("nan")},
        {"group_size": True},
        {"mode": 4},
        {"bits": 4, "a.b": {"bits": 9}},
        {"bits": 4, "a.b": 6},
        {"bits": 4, "a.b": "8"},
        {"bits": 4, "model.a.b": {"bits": 6}, "language_model.model.a.b": {"bits": 8}},
        [4, 64],
        "4bit",
    ],
)
def test_impossible_declarations_are_refused(declared: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        parse_quantization({"quantization": declared}, "config.json")


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="mode 'q4_k'"):
        parse_quantization({"quantization": {"mode": "q4_k"}}, "config.json")


AFFINE = {"bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("changes", "declared", "complaint"),
    [
        ({}, {"bits": 8, "group_size": 32}, r"x\.weight.*16 words.*got 8 words.*4 bits"),
        ({}, {"bits": 4, "group_size": 64}, r"x\.weight.*2 bits"),
        ({}, {"mode": "mxfp4"}, "has biases"),
        ({"x.biases": None}, AFFINE, "has no biases"),
        ({"x.scales": None}, AFFINE, "x.*biases.*no scales"),
        ({"x.weight": None}, AFFINE, "x: has scales but no weight"),
        ({"x.scales": plain(5, 2), "x.biases": plain(5, 2)}, AFFINE, "don't fit"),
        ({"x.scales": plain(6, 3)}, AFFINE, "biases.*differ from scales"),
        ({"x.biases": plain(6, 2, dtype="F32")}, AFFINE, "biases.*differ from scales"),
        ({"x.scales": plain(6, 2, dtype="U8")}, AFFINE, "scales.*must be BF16"),
        ({"x.weight": plain(6, 8, dtype="F32")}, AFFINE, "codes must be U32"),
        ({"x.weight": plain(8, dtype="U32")}, AFFINE, "codes must be U32 of two"),
        ({"x.scales": plain(6, 0), "x.biases": plain(6, 0)}, AFFINE, "0 inputs"),
        ({"x.scales": plain(), "x.biases": plain()}, AFFINE, "don't fit"),
        ({}, None, "isn't quantised"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_tensor_named(
    tmp_path: Path, changes: dict[str, Any], declared: dict[str, Any] | None, complaint: str
) -> None:
    tensors = {**quantised("x", 6, 64, bits=4, group=32), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=complaint):
        _build(tmp_path, tensors, declared)


@pytest.mark.parametrize("dtype", ["U32", "U8"])
def test_codes_without_scales_are_no_weight(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(CheckpointError, match=f"x.weight: {dtype}.*without scales"):
        _build(tmp_path, {"x.weight": plain(4, 4, dtype=dtype)}, None)


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": plain(4), "language_model.model.norm.weight": plain(4)}
    with pytest.raises(CheckpointError, match="two spellings"):
        _build(tmp_path, tensors, None)
