"""GGUF files hold the checkpoint's weights: read back with the format's own library and dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles import tensorfile
from oracles.dequantise import dequantise

from lily_py.bench.gguf_export import export_gguf
from lily_py.bench.gguf_tile import tile_gguf
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError, UnsupportedModelError

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install 'lily-py[bench]'")

Floats = NDArray[np.floating[Any]]


class Exported:
    """A GGUF file read back."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.values: dict[str, Floats] = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }


def export(folder: Path, kind: Any, path: Path) -> Exported:
    export_gguf(open_checkpoint(folder), path, kind, progress=False)
    return Exported(path)


def weights(folder: Path) -> dict[str, Floats]:
    """All weights of a checkpoint by module path, dequantised."""
    tensors = tensorfile.read_folder(folder)
    found = {}
    for name, array in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        path = name.removesuffix(".weight")
        if f"{path}.scales" in tensors:
            scales = tensors[f"{path}.scales"].astype(np.float64)
            bits = 8 if path.endswith((".gate", "_gate")) else 4
            width = array.shape[-1] * 32 // bits
            found[path] = dequantise(array, scales, tensors[f"{path}.biases"].astype(np.float64), width)
        else:
            found[path] = array.astype(np.float64)
    return found


def value_head_order(key_heads: int, value_heads: int) -> list[int]:
    """llama.cpp repeats the key heads as a whole: its value head v belongs to key head v modulo their number,
    MLX's to key head v // ratio."""
    ratio = value_heads // key_heads
    return [v % key_heads * ratio + v // key_heads for v in range(value_heads)]


def reorder_rows(matrix: Floats, heads: list[int], size: int, before: int = 0) -> Floats:
    rows = list(range(before)) + [before + head * size + i for head in heads for i in range(size)]
    return matrix[rows]


MODEL = "language_model.model."


@pytest.fixture(scope="module")
def q4_0(synthetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(synthetic, "q4_0", tmp_path_factory.mktemp("gguf") / "q4_0.gguf")


def test_every_four_bit_weight_is_exact_in_q4_0(synthetic: Path, q4_0: Exported) -> None:
    source = weights(synthetic)
    same = {
        "token_embd.weight": f"{MODEL}embed_tokens",
        "output.weight": "language_model.lm_head",
        "blk.3.attn_q.weight": f"{MODEL}layers.3.self_attn.q_proj",
        "blk.3.attn_k.weight": f"{MODEL}layers.3.self_attn.k_proj",
        "blk.3.attn_v.weight": f"{MODEL}layers.3.self_attn.v_proj",
        "blk.3.attn_output.weight": f"{MODEL}layers.3.self_attn.o_proj",
        "blk.5.ffn_gate_exps.weight": f"{MODEL}layers.5.mlp.switch_mlp.gate_proj",
        "blk.5.ffn_up_exps.weight": f"{MODEL}layers.5.mlp.switch_mlp.up_proj",
        "blk.5.ffn_down_exps.weight": f"{MODEL}layers.5.mlp.switch_mlp.down_proj",
        "blk.5.ffn_down_shexp.weight": f"{MODEL}layers.5.mlp.shared_expert.down_proj",
    }
    for name, path in same.items():
        assert q4_0.types[name] == "Q4_0"
        assert np.array_equal(q4_0.values[name], source[path]), name


def test_the_gated_delta_nets_value_heads_are_in_llama_cpps_order(synthetic: Path, q4_0: Exported) -> None:
    source = weights(synthetic)
    heads, size, before = value_head_order(2, 4), 64, 2 * 2 * 64
    assert heads == [0, 2, 1, 3]
    a = f"{MODEL}layers.0.linear_attn."
    expected = {
        "attn_qkv.weight": reorder_rows(source[f"{a}in_proj_qkv"], heads, size, before),
        "attn_gate.weight": reorder_rows(source[f"{a}in_proj_z"], heads, size),
        "ssm_beta.weight": reorder_rows(source[f"{a}in_proj_b"], heads, 1),
        "ssm_alpha.weight": reorder_rows(source[f"{a}in_proj_a"], heads, 1),
        "ssm_out.weight": reorder_rows(source[f"{a}out_proj"].T, heads, size).T,
        "ssm_conv1d.weight": reorder_rows(source[f"{a}conv1d"][..., 0], heads, size, before),
        "ssm_dt.bias": reorder_rows(source[f"{a}dt_bias"], heads, 1),
        "ssm_norm.weight": source[f"{a}norm"],
    }
    for name, values in expected.items():
        assert np.array_equal(q4_0.values[f"blk.0.{name}"], values), name
    decay = -np.exp(reorder_rows(source[f"{a}A_log"], heads, 1))
    assert np.allclose(q4_0.values["blk.0.ssm_a"], decay, rtol=1e-6)


def test_routers_and_norms_are_fp32(synthetic: Path, q4_0: Exported) -> None:
    source = weights(synthetic)
    expected = {
        "blk.2.ffn_gate_inp.weight": source[f"{MODEL}layers.2.mlp.gate"],
        "blk.2.ffn_gate_inp_shexp.weight": source[f"{MODEL}layers.2.mlp.shared_expert_gate"][0],
        "blk.2.attn_norm.weight": source[f"{MODEL}layers.2.input_layernorm"],
        "blk.2.post_attention_norm.weight": source[f"{MODEL}layers.2.post_attention_layernorm"],
        "blk.3.attn_q_norm.weight": source[f"{MODEL}layers.3.self_attn.q_norm"],
        "output_norm.weight": source[f"{MODEL}norm"],
    }
    for name, values in expected.items():
        assert q4_0.types[name] == "F32"
        assert np.allclose(q4_0.values[name], values, rtol=1e-6, atol=1e-8), name


def test_the_models_sizes_are_in_the_header(q4_0: Exported) -> None:
    sizes = {
        "block_count": 8, "embedding_length": 256, "vocab_size": 4096, "expert_count": 16,
        "expert_used_count": 4, "expert_feed_forward_length": 256, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 64, "ssm.conv_kernel": 4, "ssm.state_size": 64,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256, "full_attention_interval": 4,
        "rope.dimension_count": 16,
    }  # fmt: skip
    assert q4_0.fields["general.architecture"] == "qwen35moe"
    assert {name: q4_0.fields[f"qwen35moe.{name}"] for name in sizes} == sizes


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 1e-6), ("f16", 1e-3), ("q4_1", 1e-7)])
def test_other_types_hold_the_same_weights(
    kind: str, tolerance: float, synthetic_dense: Path, tmp_path: Path
) -> None:
    exported = export(synthetic_dense, kind, tmp_path / "model.gguf")
    source = weights(synthetic_dense)
    assert exported.fields["general.architecture"] == "qwen35"
    assert "output.weight" not in exported.values  # the embedding is the output head
    for name, path in {
        "token_embd.weight": f"{MODEL}embed_tokens",
        "blk.1.ffn_gate.weight": f"{MODEL}layers.1.mlp.gate_proj",
        "blk.1.ffn_down.weight": f"{MODEL}layers.1.mlp.down_proj",
        "blk.3.attn_output.weight": f"{MODEL}layers.3.self_attn.o_proj",
    }.items():
        assert exported.types[name] == kind.upper()
        error = np.abs(exported.values[name] - source[path]).max()
        assert error <= tolerance * np.abs(source[path]).max(), name


def test_a_weight_that_q4_0_cant_hold_becomes_q4_1(tiny: Any, tmp_path: Path) -> None:
    folder = tiny("moe", "mlx-4bit-g64", dtype="bfloat16")
    exported = export(folder, "q4_0", tmp_path / "model.gguf")
    source = weights(folder)
    name, path = "blk.0.ffn_up_exps.weight", f"{MODEL}layers.0.mlp.switch_mlp.up_proj"
    assert exported.types[name] == "Q4_1"
    assert np.abs(exported.values[name] - source[path]).max() <= 1e-6


def test_other_formats_become_q8_0(tiny: Any, tmp_path: Path) -> None:
    folder = tiny("dense", "mlx-6bit-g64", dtype="bfloat16")
    exported = export(folder, "q4_0", tmp_path / "model.gguf")
    tensors = tensorfile.read_folder(folder)
    path = f"{MODEL}layers.0.mlp.up_proj"
    scales, biases = (tensors[f"{path}.{part}"].astype(np.float64) for part in ("scales", "biases"))
    expected = dequantise(tensors[f"{path}.weight"], scales, biases, 128)
    name = "blk.0.ffn_up.weight"
    assert exported.types[name] == "Q8_0"
    # Half a step of a block whose largest value is 127 steps, and the rounding of its fp16 scale.
    step = np.abs(expected).reshape(-1, 32).max(1, keepdims=True) / 127
    error = np.abs(exported.values[name] - expected).reshape(-1, 32)
    assert (error <= 0.5 * step + 127 * step * 2**-11).all()


def test_norms_of_an_unconverted_checkpoint_get_their_one(tiny: Any, tmp_path: Path) -> None:
    exported = export(tiny("dense", "hf"), "f32", tmp_path / "model.gguf")
    raw = tensorfile.read_folder(tiny("dense", "hf"))
    name = "model.language_model.layers.0.input_layernorm.weight"
    assert np.allclose(exported.values["blk.0.attn_norm.weight"], raw[name].astype(np.float64) + 1)


def test_a_tensor_without_a_place_is_named(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"experts\.gate_up_proj: has no place in GGUF"):
        export_gguf(open_checkpoint(tiny("moe", "hf")), tmp_path / "model.gguf", "f32")


def test_an_unknown_type_is_refused(synthetic: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'q2' isn't known; choose from f32, f16, q4_0, q4_1"):
        export_gguf(open_checkpoint(synthetic), tmp_path / "model.gguf", "q2")  # type: ignore[arg-type]


def test_a_tiled_file_repeats_the_layers_of_its_slice(synthetic_dense: Path, tmp_path: Path) -> None:
    slice_path = tmp_path / "slice.gguf"
    source = export(synthetic_dense, "q4_0", slice_path)
    tiled = Exported(tile_gguf(slice_path, tmp_path / "tiled.gguf", 8, progress=False))
    assert tiled.fields["qwen35.block_count"] == 8
    assert tiled.fields["qwen35.rope.dimension_sections"] == source.fields["qwen35.rope.dimension_sections"]
    ends = [name for name in source.values if not name.startswith("blk.")]
    assert len(tiled.values) == 2 * len(source.values) - len(ends)
    for name, values in source.values.items():
        layer = name.removeprefix("blk.").split(".")[0]
        for copy in {
            name,
            name.replace(f"blk.{layer}.", f"blk.{int(layer) + 4}.") if name not in ends else name,
        }:
            assert tiled.types[copy] == source.types[name]
            assert np.array_equal(tiled.values[copy], values), copy
    with pytest.raises(InvalidArgumentError, match=r"must be a multiple of the 4 of .*slice\.gguf, got 6"):
        tile_gguf(slice_path, tmp_path / "other.gguf", 6)
