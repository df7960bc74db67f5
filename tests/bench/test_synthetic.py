"""Synthetic checkpoints: the layout of the published ones, and values that behave like a model's."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_mlx_model
from oracles import tensorfile
from oracles.mlx_oracle import MlxOracle
from oracles.reference import Reference
from tokenizers import Tokenizer

from lily_py.bench.shapes import SHAPES
from lily_py.bench.synthetic import checkpoint_tensors, make_checkpoint
from lily_py.bench.workload import prompt_ids
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError
from lily_py.loader import load_model


@pytest.mark.parametrize("name", ["synthetic", "synthetic_dense"])
def test_mlx_lm_finds_exactly_the_tensors_it_expects(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    model, _ = load_mlx_model(folder)  # strict: a missing, surplus or misshapen tensor is an error
    expected = dict(tree_flatten(model.parameters()))
    tensors = tensorfile.read_folder(folder)
    assert tensors.keys() == expected.keys()
    types = {np.dtype(np.uint32): mx.uint32, np.dtype(np.float32): mx.float32}
    for path, array in tensors.items():
        assert array.shape == expected[path].shape
        assert types.get(array.dtype, mx.bfloat16) == expected[path].dtype, path


def test_only_routers_and_shared_gates_have_eight_bits(synthetic: Path) -> None:
    model, _ = load_mlx_model(synthetic)
    bits = {path: module.bits for path, module in model.named_modules() if hasattr(module, "bits")}
    eight = {path for path, value in bits.items() if value == 8}
    assert eight == {path for path in bits if path.endswith((".mlp.gate", ".mlp.shared_expert_gate"))}
    assert set(bits.values()) == {4, 8}
    assert isinstance(model.language_model.model.embed_tokens, nn.QuantizedEmbedding)


@pytest.mark.parametrize("name", ["synthetic", "synthetic_dense"])
def test_lily_and_mlx_lm_compute_the_same_logits(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    checkpoint = open_checkpoint(folder)
    ids = prompt_ids(24, checkpoint.config.vocab_size)
    model = load_model(checkpoint, kv_dtype="float32", ablate=["integer_dot"])
    logits = model.forward(model.new_sequence(), ids, all=True)
    assert logits is not None
    expected = MlxOracle(folder).forward(ids).logits
    assert np.abs(logits - expected).max() < 5e-4 * expected.std()


def test_activations_keep_their_size_and_tokens_choose_different_experts(synthetic: Path) -> None:
    ids = prompt_ids(192, 4096)
    result = Reference(synthetic).forward(ids)
    assert 0.3 < result.logits.std() < 3
    for layer, chosen in result.experts.items():
        share = np.bincount(chosen.reshape(-1), minlength=16) / chosen.size
        assert share.max() < 4 / 16, f"layer {layer} favours an expert: {share}"
        assert share.min() > 0, f"layer {layer} never uses an expert: {share}"
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 60


def test_values_depend_on_the_seed_and_on_nothing_else(synthetic: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    again = make_checkpoint("tiny", tmp_path / "again", progress=False)
    other = make_checkpoint("tiny", tmp_path / "other", seed=1, progress=False)
    assert digest(again) == digest(synthetic)
    assert digest(other) != digest(synthetic)


def test_shards_hold_the_same_tensors_as_one_file(synthetic: Path, tmp_path: Path) -> None:
    limit = 2_000_000
    folder = make_checkpoint("tiny", tmp_path / "sharded", progress=False, shard_bytes=limit)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 5
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(shard.stat().st_size < limit + 20_000 for shard in shards)
    whole, split = tensorfile.read_folder(synthetic), tensorfile.read_folder(folder)
    assert whole.keys() == split.keys()
    assert all(np.array_equal(whole[name], split[name]) for name in whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    assert open_checkpoint(folder).nbytes == open_checkpoint(synthetic).nbytes


def test_the_full_model_has_the_published_size_and_its_largest_tensors_are_made_in_pieces() -> None:
    tensors, quantization = checkpoint_tensors(SHAPES["35b-a3b"], 0)
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(19.5e9, rel=0.005)
    assert sum(isinstance(value, dict) for value in quantization.values()) == 80
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    assert largest.nbytes > 250e6
    tracemalloc.start()
    written = sum(piece.nbytes for piece in largest.pieces())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written == largest.nbytes
    assert peak < 150e6


def test_the_tokenizer_knows_every_id(synthetic: Path) -> None:
    tokenizer = Tokenizer.from_file(str(synthetic / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.decode(tokenizer.encode("Grüße, world").ids) == "Grüße, world"
    assert tokenizer.decode([1000, 2000]) == " w1000 w2000"
    end = tokenizer.encode("<|im_end|>").ids
    assert end == [4095]
    assert open_checkpoint(synthetic).config.eos_token_ids == (4095, 4093)


def test_a_folder_in_use_is_only_replaced_when_told(tmp_path: Path) -> None:
    folder = tmp_path / "used"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match=r"used: exists and isn't empty; pass --force"):
        make_checkpoint("tiny-dense", folder, progress=False)
    assert (folder / "notes.txt").exists()
    make_checkpoint("tiny-dense", folder, force=True, progress=False)
    assert not (folder / "notes.txt").exists()


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(InvalidArgumentError, match=r"takes 19\.5 GB and the disk has 1\.0 GB free"):
        make_checkpoint("35b-a3b", tmp_path / "full", progress=False)
    assert not any((tmp_path / "full").iterdir())


def test_an_unknown_shape_is_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"shape 'huge' isn't known; choose one of tiny, .*35b-a3b"
    ):
        make_checkpoint("huge", tmp_path / "x")
