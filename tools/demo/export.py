"""Write the trained network as an MLX 4-bit checkpoint folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .network import DemoNetwork
from .text import TEMPLATE

GROUP = 64
EIGHT_BIT = ("mlp.gate", "mlp.shared_expert_gate")  # routers decide which experts run: they keep 8 bits


def quantize(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [..., out, in] affinely as MLX does: w ~ scale * q + bias in groups along the input.

    The extreme value of larger magnitude in a group is met exactly. Scales and biases are rounded to bf16
    before the codes are chosen, so that the codes fit what is stored. Returns uint32 [..., out, in * bits /
    32] (first code in the lowest bits), scales and biases bf16 [..., out, in / group].
    """
    top = 2**bits - 1
    w = weight.detach().float().unflatten(-1, (-1, group))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    edge = torch.where(low.abs() > high.abs(), low, high)
    scale = ((high - low) / top).clamp(min=1e-7) * torch.where(low.abs() > high.abs(), 1.0, -1.0)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale).to(torch.bfloat16)
    bias = torch.where(steps != 0, edge, 0.0).to(torch.bfloat16)
    codes = ((w - bias.float()) / scale.float()).round().clamp(0, top)
    codes = codes.flatten(-2).numpy().astype(np.uint32).reshape(*weight.shape[:-1], -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    packed = np.bitwise_or.reduce(codes << shifts, axis=-1)
    return torch.from_numpy(packed), scale.squeeze(-1), bias.squeeze(-1)


def dequantize(packed: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    """Return the float32 weight that `quantize` stored."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (packed.numpy()[..., None] >> shifts) & np.uint32(2**bits - 1)
    w = torch.from_numpy(codes.astype(np.float32)).flatten(-2).unflatten(-1, (-1, GROUP))
    return (w * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(-2)


def _mlx_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the fused expert tensors, move the convolution's axis, add one to zero-centred norms."""
    out: dict[str, Tensor] = {}
    for name, w in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = w.chunk(2, dim=-2)
            base = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            out[base + "gate_proj.weight"], out[base + "up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = w
        elif name.endswith("conv1d.weight"):
            out[name] = w.movedim(2, 1)
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            out[name] = w + 1.0
        else:
            out[name] = w
    return out


def quantized_tensors(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return an MLX folder's tensors and the modules of 8 bits; `state` has transformers' layout."""
    out: dict[str, Tensor] = {}
    eight: list[str] = []
    for name, w in _mlx_layout(state).items():
        module = name.removesuffix(".weight")
        if w.ndim < 2 or name.endswith("conv1d.weight"):
            keep = torch.float32 if name.endswith("A_log") else torch.bfloat16
            out[name] = w.detach().to(keep).contiguous()
            continue
        bits = 8 if module.endswith(EIGHT_BIT) else 4
        if bits == 8:
            eight.append(module)
        out[name], out[module + ".scales"], out[module + ".biases"] = quantize(w, bits)
    return out, eight


@torch.no_grad()
def round_to_stored(network: DemoNetwork) -> None:
    """Replace every weight by the value that `export` stores, in place, to measure what was written."""
    for name, p in network.named_parameters():
        if p.ndim >= 2 and not name.endswith("conv1d.weight"):
            bits = 8 if name.removesuffix(".weight").endswith(EIGHT_BIT) else 4
            p.copy_(dequantize(*quantize(p, bits), bits))
        elif not name.endswith("A_log"):
            shift = 1.0 if "norm" in name and not name.endswith("linear_attn.norm.weight") else 0.0
            p.copy_((p + shift).to(torch.bfloat16).float() - shift)


def export(network: DemoNetwork, tokenizer: Tokenizer, folder: Path) -> int:
    """Write config, weights, tokenizer, template, generation settings; return the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    trunk = {
        "language_model." + ("" if k.startswith("lm_head") else "model.") + k.removeprefix("model."): w
        for k, w in network.trunk.state_dict().items()
    }
    files: dict[str, dict[str, Tensor]] = {}
    files["model.safetensors"], eight = quantized_tensors(trunk)
    files["mtp.safetensors"], eight_mtp = quantized_tensors(
        {"mtp." + k: w for k, w in network.mtp.state_dict().items()}
    )
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "mlx"})
        (folder / file).chmod(0o644)
    total = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
    names = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}

    token = tokenizer.token_to_id
    end, stop = token("<|endoftext|>"), token("<|im_end|>")
    text: dict[str, Any] = network.config.to_dict()
    for key in (
        "architectures",
        "transformers_version",
        "id2label",
        "label2id",
        "_name_or_path",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "is_encoder_decoder",
    ):
        text.pop(key, None)
    text.update(
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        full_attention_interval=4,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        dtype="bfloat16",
        bos_token_id=end,
        eos_token_id=end,
        partial_rotary_factor=0.25,
    )
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    quantization.update({module: {"group_size": GROUP, "bits": 8} for module in eight + eight_mtp})
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [stop, end],
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization": quantization,
        "quantization_config": quantization,
    }
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    generation = {"bos_token_id": end, "eos_token_id": [stop, end], "pad_token_id": end, **sampling}
    for name, value in (
        ("config.json", config),
        ("model.safetensors.index.json", index),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".py" and f.is_file())
