"""Faults reported of other engines when loading checkpoints, replayed: B01-B09 and the files' part of B12."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from checkpoint_builders import (
    CONFIG,
    EXPERTS,
    HIDDEN,
    Tensors,
    config,
    mtp_head,
    plain,
    quantised,
    trunk,
    write_checkpoint,
    write_file,
    write_index,
)

from lily_py.checkpoint import Quantization, open_checkpoint
from lily_py.errors import CheckpointError, CheckpointNotFoundError

BODY = "language_model.model"


@pytest.mark.parametrize("raw", [True, False], ids=["original", "converted"])
def test_b01_norms_are_shifted_where_the_convolution_is_raw_and_nowhere_else(
    tmp_path: Path, raw: bool
) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw) | mtp_head())
    for _ in range(2):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config.norm_shift is raw
        assert checkpoint.mtp_norm_shift is raw, "one decision for trunk and head of one checkpoint"


def test_b01_a_sidecar_without_mtp_prefix_is_found_and_taken_for_converted(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", trunk(raw=True))
    sidecar = write_file(tmp_path / "side" / "model.safetensors", mtp_head(prefix="", form="stacked"))
    checkpoint = open_checkpoint(base, mtp=sidecar)
    assert "mtp.layers.0.mlp.experts.gate_proj" in checkpoint.weights
    assert checkpoint.config.norm_shift is True
    assert checkpoint.mtp_norm_shift is False, "only converters drop the prefix, and they add the 1"


def test_b01_a_half_converted_checkpoint_is_refused(tmp_path: Path) -> None:
    tensors = trunk(raw=False)
    tensors[f"{BODY}.layers.1.linear_attn.conv1d.weight"] = plain(128, 1, 4)
    folder = write_checkpoint(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match="different layouts"):
        open_checkpoint(folder)


@pytest.mark.parametrize("mean", [0.0, 0.27, 1.0])
@pytest.mark.parametrize("raw", [True, False], ids=["original", "converted"])
def test_b02_values_of_norms_decide_nothing(tmp_path: Path, raw: bool, mean: float) -> None:
    tensors = trunk(raw) | mtp_head()
    for name in tensors:
        if "norm" in name:
            tensors[name] = ("F32", np.full(tensors[name][1].shape, mean, np.float32))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", tensors))
    assert (checkpoint.config.norm_shift, checkpoint.mtp_norm_shift) == (raw, raw)


@pytest.mark.parametrize("tensor_prefix", ["language_model.model.", "model.language_model.", "model."])
@pytest.mark.parametrize("override_prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_b03_overrides_match_tensors_under_every_spelling(
    tmp_path: Path, tensor_prefix: str, override_prefix: str
) -> None:
    tensors: Tensors = {
        name.replace(f"{BODY}.", tensor_prefix): tensor
        for name, tensor in trunk(raw=False).items()
        if "in_proj_qkv" not in name
    }
    tensors |= quantised(f"{tensor_prefix}layers.0.linear_attn.in_proj_qkv", 128, HIDDEN, bits=6, group=64)
    quantization = {
        "group_size": 32,
        "bits": 4,
        f"{override_prefix}layers.0.linear_attn.in_proj_qkv": {"group_size": 64, "bits": 6},
        f"{override_prefix}layers.0.linear_attn.in_proj_z": False,
    }
    folder = write_checkpoint(tmp_path / "model", tensors, CONFIG | {"quantization": quantization})
    weights = open_checkpoint(folder).weights
    assert weights["layers.0.linear_attn.in_proj_qkv"].quantization == Quantization("affine", 6, 64)
    assert weights["layers.0.linear_attn.in_proj_qkv"].shape == (128, HIDDEN)
    assert weights["layers.0.linear_attn.in_proj_z"].quantization is None


def test_b03_an_override_that_contradicts_the_shapes_names_tensor_expected_and_got(tmp_path: Path) -> None:
    name = f"{BODY}.layers.0.linear_attn.in_proj_qkv"
    tensors = trunk(raw=False) | quantised(name, 128, HIDDEN, bits=6, group=32)
    folder = write_checkpoint(
        tmp_path / "model", tensors, CONFIG | {"quantization": {"group_size": 32, "bits": 4}}
    )
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    message = str(error.value)
    assert f"{name}.weight" in message
    assert "8 words" in message, "expected: 64 inputs of 4 bits"
    assert "got 12 words" in message
    assert "6 bits" in message


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_b04_microscaling_experts_have_no_biases_beside_affine_weights_that_do(
    tmp_path: Path, mode: str
) -> None:
    bits = 4 if mode == "mxfp4" else 8
    tensors = trunk(raw=False)
    overrides = {}
    for projection, out, inputs in (("gate", 32, HIDDEN), ("up", 32, HIDDEN), ("down", HIDDEN, 32)):
        name = f"{BODY}.layers.0.mlp.switch_mlp.{projection}_proj"
        tensors |= quantised(name, EXPERTS, out, inputs, bits=bits, mode=mode)
        overrides[name] = {"group_size": 32, "bits": bits, "mode": mode}
    tensors |= quantised(f"{BODY}.layers.1.self_attn.q_proj", 256, HIDDEN, bits=8, group=64)
    quantization = {"group_size": 64, "bits": 8, **overrides}
    folder = write_checkpoint(tmp_path / "model", tensors, CONFIG | {"quantization": quantization})
    weights = open_checkpoint(folder).weights
    expert = weights["layers.0.mlp.experts.down_proj"]
    assert expert.quantization == Quantization(mode, bits, 32)  # type: ignore[arg-type]
    assert expert.biases is None
    assert expert.shape == (EXPERTS, HIDDEN, 32)
    assert weights["layers.1.self_attn.q_proj"].biases is not None


def test_b04_an_affine_weight_without_biases_is_refused(tmp_path: Path) -> None:
    name = f"{BODY}.layers.1.self_attn.q_proj"
    tensors = trunk(raw=False) | quantised(name, 256, HIDDEN)
    del tensors[f"{name}.biases"]
    folder = write_checkpoint(
        tmp_path / "model", tensors, CONFIG | {"quantization": {"group_size": 32, "bits": 4}}
    )
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.weight.*no biases"):
        open_checkpoint(folder)


def test_b05_the_mode_of_an_override_wins_over_nvfp4(tmp_path: Path) -> None:
    tensors = trunk(raw=False)
    tensors |= quantised(f"{BODY}.layers.1.self_attn.q_proj", 256, HIDDEN, group=16, mode="nvfp4")
    tensors |= quantised(f"{BODY}.layers.1.mlp.gate", EXPERTS, HIDDEN, bits=8, group=64)
    tensors |= quantised(f"{BODY}.layers.1.mlp.shared_expert_gate", 1, HIDDEN, bits=8, group=64)
    affine = {"group_size": 64, "bits": 8, "mode": "affine"}
    quantization = {
        "group_size": 16,
        "bits": 4,
        "mode": "nvfp4",
        f"{BODY}.layers.1.mlp.gate": affine,
        f"{BODY}.layers.1.mlp.shared_expert_gate": {"bits": 8, "mode": "affine"},
    }
    folder = write_checkpoint(tmp_path / "model", tensors, CONFIG | {"quantization": quantization})
    weights = open_checkpoint(folder).weights
    assert weights["layers.1.self_attn.q_proj"].quantization == Quantization("nvfp4", 4, 16)
    assert weights["layers.1.mlp.gate"].quantization == Quantization("affine", 8, 64)
    assert weights["layers.1.mlp.shared_expert_gate"].quantization == Quantization("affine", 8, 64)
    assert weights["layers.1.mlp.shared_expert_gate"].shape == (1, HIDDEN)


def _sharded(folder: Path, tensors: Tensors) -> Path:
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    return write_checkpoint(folder, tensors, shards=shards)


def test_b06_a_missing_shard_is_named_before_anything_else(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "model", trunk(raw=True))
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        open_checkpoint(folder)


def test_b06_a_stray_file_beside_indexed_shards_is_ignored(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "model", trunk(raw=True))
    write_file(folder / "model.safetensors", {name: plain(1) for name in trunk(raw=True)})
    checkpoint = open_checkpoint(folder)
    assert [path.name for path in checkpoint.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert checkpoint.weights["embed_tokens"].shape == (96, HIDDEN)


def test_b06_shards_without_an_index_must_be_complete(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "model", trunk(raw=True))
    (folder / "model.safetensors.index.json").unlink()
    assert open_checkpoint(folder).weights
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model-00001-of-00002"):
        open_checkpoint(folder)


def test_b07_the_head_is_found_in_whatever_file_the_index_names(tmp_path: Path) -> None:
    body, head = trunk(raw=True), mtp_head()
    shards = {"model-00001-of-00001.safetensors": list(body), "mtp.safetensors": list(head)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", body | head, shards=shards))
    assert checkpoint.mtp_source == "checkpoint"
    assert checkpoint.files[checkpoint.weights["mtp.fc"].data.file].name == "mtp.safetensors"
    assert checkpoint.mtp_norm_shift is True


@pytest.mark.parametrize("name", ["mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors"])
@pytest.mark.parametrize("raw", [True, False], ids=["original", "converted"])
def test_b07_the_head_is_found_beside_the_checkpoint(tmp_path: Path, name: str, raw: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw))
    sidecar = write_file(folder / name, mtp_head())
    checkpoint = open_checkpoint(folder)
    assert checkpoint.mtp_source == str(sidecar)
    assert checkpoint.files[-1] == sidecar
    assert checkpoint.weights["mtp.fc"].data.file == len(checkpoint.files) - 1
    assert checkpoint.mtp_norm_shift is raw, "a file of the same folder follows the trunk"


def test_b07_a_promised_head_that_is_absent_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True))
    with caplog.at_level(logging.WARNING, logger="lily"):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.mtp_source is None
    assert checkpoint.config.mtp_num_hidden_layers == 0
    assert [record.name for record in caplog.records] == ["lily.checkpoint"]
    assert "MTP" in caplog.text


def test_b07_without_a_promise_there_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True), config(mtp_num_hidden_layers=0))
    assert open_checkpoint(folder).mtp_source is None
    assert not caplog.records


@pytest.mark.parametrize("form", ["fused", "stacked", "per_expert"])
def test_b08_every_form_of_the_moe_head_is_taken(tmp_path: Path, form: str) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True) | mtp_head(form=form))
    weights = open_checkpoint(folder).weights
    prefix = "mtp.layers.0.mlp.experts"
    expected = {
        "fused": {
            f"{prefix}.gate_up_proj": (EXPERTS, 64, HIDDEN),
            f"{prefix}.down_proj": (EXPERTS, HIDDEN, 32),
        },
        "stacked": {
            f"{prefix}.gate_proj": (EXPERTS, 32, HIDDEN),
            f"{prefix}.down_proj": (EXPERTS, HIDDEN, 32),
        },
        "per_expert": {f"{prefix}.3.gate_proj": (32, HIDDEN), f"{prefix}.0.down_proj": (HIDDEN, 32)},
    }[form]
    assert {name: weights[name].shape for name in expected} == expected


def test_b08_a_quantised_sidecar_with_plain_gates_is_taken(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", trunk(raw=False))
    head = mtp_head(prefix="", form="stacked")
    for name in [name for name in head if "switch_mlp" in name]:
        head |= quantised(name.removesuffix(".weight"), *head[name][1].shape, bits=4, group=32)
    head |= quantised("fc", HIDDEN, 2 * HIDDEN, bits=8, group=64)
    side_config = {
        "model_type": "qwen3_5_mtp",
        "quantization": {"group_size": 32, "bits": 4, "fc": {"group_size": 64, "bits": 8}},
    }
    sidecar = write_checkpoint(tmp_path / "sidecar", head, side_config)
    checkpoint = open_checkpoint(base, mtp=sidecar)
    assert checkpoint.mtp_source == str(sidecar)
    assert checkpoint.weights["mtp.fc"].quantization == Quantization("affine", 8, 64)
    experts = checkpoint.weights["mtp.layers.0.mlp.experts.up_proj"]
    assert experts.quantization == Quantization("affine", 4, 32)
    assert experts.shape == (EXPERTS, 32, HIDDEN)
    assert checkpoint.weights["mtp.layers.0.mlp.gate"].quantization is None
    assert checkpoint.mtp_norm_shift is False


def test_b09_a_tied_model_ignores_a_redundant_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True), config(tie_word_embeddings=True))
    checkpoint = open_checkpoint(folder)
    assert "lm_head" not in checkpoint.weights
    assert ["lm_head.weight"] in checkpoint.ignored.values()


def test_b09_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True, head=False))
    with pytest.raises(CheckpointError, match=r"no lm_head.*tie_word_embeddings"):
        open_checkpoint(folder)


def test_b09_the_embedding_may_have_bits_of_its_own(tmp_path: Path) -> None:
    tensors = trunk(raw=False)
    tensors |= quantised(f"{BODY}.embed_tokens", 96, HIDDEN, bits=8, group=64)
    tensors |= quantised("language_model.lm_head", 96, HIDDEN, bits=4, group=32)
    quantization = {"group_size": 32, "bits": 4, f"{BODY}.embed_tokens": {"group_size": 64, "bits": 8}}
    folder = write_checkpoint(tmp_path / "model", tensors, CONFIG | {"quantization": quantization})
    weights = open_checkpoint(folder).weights
    assert weights["embed_tokens"].quantization == Quantization("affine", 8, 64)
    assert weights["lm_head"].quantization == Quantization("affine", 4, 32)
    assert weights["embed_tokens"].shape == weights["lm_head"].shape == (96, HIDDEN)


@pytest.mark.parametrize("in_text", [None, 5, [5, 6]])
@pytest.mark.parametrize("outside", [None, 7, [7]])
@pytest.mark.parametrize("generation", [None, 9, [5, 9]])
def test_b12_end_tokens_are_the_union_of_all_files(
    tmp_path: Path, in_text: object, outside: object, generation: object
) -> None:
    folder = write_checkpoint(
        tmp_path / "model", trunk(raw=True), config(eos_token_id=in_text) | {"eos_token_id": outside}
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    mentioned = [
        item
        for value in (in_text, outside, generation)
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    ]
    assert set(open_checkpoint(folder).config.eos_token_ids) == set(mentioned)


def test_b12_an_end_token_beyond_the_vocabulary_can_not_be_sampled_and_is_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", trunk(raw=True), config(eos_token_id=[3, 248044]))
    assert open_checkpoint(folder).config.eos_token_ids == (3,)


def test_an_index_that_promises_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "model", trunk(raw=True))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, index | {"model.extra.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"00001.*model\.extra\.weight.*isn't there"):
        open_checkpoint(folder)
