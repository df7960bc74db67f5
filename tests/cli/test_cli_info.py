"""`lily info`: sizes from a description alone, against the native model, the files and published figures."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run
from safetensors import safe_open

import lily_py

SHAPES = [
    ("moe", "mlx-4bit-g64"),
    ("moe_tied", "mlx-mixed"),
    ("dense", "hf"),
    ("gdn_ratio4", "mlx"),
    ("interval2", "mlx"),
]


def described(run: Run, folder: Path) -> dict[str, Any]:
    ran = run("info", str(folder), "--json")
    assert (ran.status, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize(("shape", "fmt"), SHAPES)
def test_memory_is_what_the_native_model_says(run: Run, tiny: Any, shape: str, fmt: str) -> None:
    folder = tiny(shape, fmt)
    found = described(run, folder)
    with lily_py.Engine.load(folder, threads=1) as engine:
        info = engine.info()
    assert found["kv_bytes_per_token"] == info.kv_per_token
    assert found["recurrent_bytes"] == info.recurrent_state
    assert {int(key): value for key, value in found["memory_per_context"].items()} == info.memory_per_context


@pytest.mark.parametrize(("shape", "fmt"), SHAPES)
def test_every_byte_of_the_files_is_in_the_table(run: Run, tiny: Any, shape: str, fmt: str) -> None:
    folder = tiny(shape, fmt)
    found = described(run, folder)
    total = 0
    for path in folder.glob("*.safetensors"):
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        total += path.stat().st_size - 8 - length
    assert sum(kind["bytes"] for kind in found["weights"]["kinds"]) == found["weights"]["bytes"] == total
    assert not any(kind["kind"] == "other" for kind in found["weights"]["kinds"])


def test_parameters_are_the_numbers_in_the_files(run: Run, tiny: Any) -> None:
    folder = tiny("dense", "hf")
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open isn't a mapping)
                if not name.startswith("mtp."):
                    size = 1
                    for length in file.get_slice(name).get_shape():
                        size *= length
                    total += size
    assert described(run, folder)["parameters"] == total


def test_bits_include_scales_and_biases(run: Run, tiny: Any) -> None:
    kinds = described(run, tiny("moe", "mlx-4bit-g64", dtype="bfloat16"))["weights"]["kinds"]
    bits = {(kind["kind"], kind["format"]): kind["bits"] for kind in kinds}
    # A scale and a bias of 16 bits for 64 codes are 32 / 64 of a bit for each.
    assert bits["experts", "affine 4-bit, groups of 64"] == 4.5
    assert bits["routers", "affine 8-bit, groups of 64"] == 8.5
    assert bits["norms", "BF16"] == 16


def big_model(folder: Path) -> Path:
    """Write the description of Qwen3.6-35B-A3B in 4 bits with files that are all holes."""
    hidden, layers, experts, width, vocab = 2048, 40, 256, 512, 248_320
    folder.mkdir()
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "full_attention_interval": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": experts,
        "num_experts_per_tok": 8, "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "rope_theta": 1e7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    router = {"bits": 8, "group_size": 64}
    quantization: dict[str, Any] = {"bits": 4, "group_size": 64}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}

    def quantised(name: str, *shape: int, bits: int = 4) -> None:
        *rows, inputs = shape
        tensors[f"{name}.weight"] = ("U32", (*rows, inputs * bits // 32))
        tensors[f"{name}.scales"] = tensors[f"{name}.biases"] = ("BF16", (*rows, inputs // 64))
        if bits == 8:
            quantization[name] = router

    root = "language_model.model"
    quantised(f"{root}.embed_tokens", vocab, hidden)
    quantised("language_model.lm_head", vocab, hidden)
    tensors[f"{root}.norm.weight"] = ("BF16", (hidden,))
    tensors["vision_tower.patch_embed.weight"] = ("BF16", (64, 64))
    for layer in range(layers):
        at = f"{root}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = ("BF16", (hidden,))
        if layer % 4 == 3:
            for name, outputs in (("q_proj", 8192), ("k_proj", 512), ("v_proj", 512)):
                quantised(f"{at}.self_attn.{name}", outputs, hidden)
            quantised(f"{at}.self_attn.o_proj", hidden, 4096)
            tensors[f"{at}.self_attn.q_norm.weight"] = tensors[f"{at}.self_attn.k_norm.weight"] = (
                "BF16",
                (256,),
            )
        else:
            mixer = f"{at}.linear_attn"
            for name, outputs in (("qkv", 8192), ("z", 4096), ("a", 32), ("b", 32)):
                quantised(f"{mixer}.in_proj_{name}", outputs, hidden)
            quantised(f"{mixer}.out_proj", hidden, 4096)
            tensors[f"{mixer}.conv1d.weight"] = ("BF16", (8192, 4, 1))
            tensors[f"{mixer}.norm.weight"] = ("BF16", (128,))
            tensors[f"{mixer}.A_log"], tensors[f"{mixer}.dt_bias"] = ("F32", (32,)), ("BF16", (32,))
        for name, outputs, inputs in (
            ("gate", width, hidden),
            ("up", width, hidden),
            ("down", hidden, width),
        ):
            quantised(f"{at}.mlp.switch_mlp.{name}_proj", experts, outputs, inputs)
            quantised(f"{at}.mlp.shared_expert.{name}_proj", outputs, inputs)
        quantised(f"{at}.mlp.gate", experts, hidden, bits=8)
        quantised(f"{at}.mlp.shared_expert_gate", 1, hidden, bits=8)

    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "U32": 4}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)
    config = {"model_type": "qwen3_5_moe", "text_config": text, "quantization": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_headline_model_has_its_published_sizes(run: Run, tmp_path: Path) -> None:
    """35 B parameters of which 3 B are active, 19.4 GB, 4-bit experts; one token's KV is 20 KiB."""
    folder = big_model(tmp_path / "big")
    found = described(run, folder)
    assert found["parameters"] == pytest.approx(35e9, rel=0.02)
    assert found["active_parameters"] == pytest.approx(3e9, rel=0.05)
    assert found["weights"]["bytes"] == pytest.approx(19.4e9, rel=0.02)
    # ten layers, keys and values, two heads of 256, two bytes
    assert found["kv_bytes_per_token"] == 10 * 2 * 2 * 256 * 2
    # thirty layers, fp32: a state [32, 128, 128] and three columns of the convolution's 8,192 channels
    assert found["recurrent_bytes"] == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert list(found["memory_per_context"]) == [str(4096 << i) for i in range(7)]
    assert found["ignored"] == {"vision tower": ["vision_tower.patch_embed.weight"]}

    out = run("info", str(folder)).out
    for shown in (
        "40: 30 gated delta net, 10 attention",
        "256 of 512, 8 a token, one shared of 512",
        "16 query heads, 2 key/value heads of 256, rotary on 64",
        "20.0 KiB a token",
        "262,144 tokens",
        "vision tower: 1 (vision_tower.patch_embed.weight)",
        "none: prompts are continued",
    ):
        assert shown in out


def test_report_of_the_demo_model(run: Run, demo: lily_py.Engine) -> None:
    out = run("info", "demo").out
    assert "qwen3_5_moe" in out
    assert "1 layer, from the checkpoint" in out
    assert demo.info().defaults in out
    assert "tensors that aren't used" not in out


def test_a_sidecar_is_told_by_its_path(run: Run, tiny: Any) -> None:
    source = tiny("moe", "mlx-4bit-g64", mtp="mtp/weights.safetensors", index=False)
    assert Path(described(run, source)["mtp_source"]).name.endswith(".safetensors")
