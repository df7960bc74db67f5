"""Folders, repositories and sidecars: what belongs to a checkpoint, and every tensor accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
from checkpoint_builders import (
    CONFIG,
    HIDDEN,
    config,
    mtp_head,
    plain,
    quantised,
    trunk,
    write_checkpoint,
    write_file,
    write_index,
)
from huggingface_hub.errors import HFValidationError

from lily_py.checkpoint import Checkpoint, open_checkpoint
from lily_py.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from lily_py.text import ChatTemplate, Tokenizer

TinyCheckpoint = Callable[..., Path]


def _names_in_files(checkpoint: Checkpoint) -> set[str]:
    names: set[str] = set()
    for path in checkpoint.files:
        with safetensors.safe_open(path, "np") as file:
            names.update(file.keys())
    return names


@pytest.mark.parametrize("fmt", ["hf", "mlx", "mlx-4bit-g64", "mlx-mxfp4", "mlx-mixed"])
@pytest.mark.parametrize("mtp", [False, True, "mtp/weights.safetensors"])
def test_every_tensor_is_used_or_ignored_for_a_reason(
    tiny: TinyCheckpoint, fmt: str, mtp: bool | str
) -> None:
    checkpoint = open_checkpoint(tiny("moe", fmt, mtp=mtp, visual=True, shards=2))
    parts = sum(len(weight.slices) for weight in checkpoint.weights.values())
    ignored = [name for names in checkpoint.ignored.values() for name in names]
    assert parts + len(ignored) == len(_names_in_files(checkpoint))
    assert list(checkpoint.ignored) == ["vision tower"]
    assert (checkpoint.mtp_source is not None) == bool(mtp)
    assert checkpoint.config.norm_shift is (fmt == "hf")
    assert not any("weight" in name or "language_model" in name for name in checkpoint.weights)


@pytest.mark.parametrize("fmt", ["hf", "mlx-8bit-g64"])
def test_qwen3_next_layout_keeps_its_fused_projections(tiny: TinyCheckpoint, fmt: str) -> None:
    checkpoint = open_checkpoint(tiny("moe", fmt, arch="qwen3_next"))
    assert "layers.0.linear_attn.in_proj_qkvz" in checkpoint.weights
    assert "layers.0.linear_attn.in_proj_ba" in checkpoint.weights
    expert = "0.gate_proj" if fmt == "hf" else "gate_proj"
    assert f"layers.0.mlp.experts.{expert}" in checkpoint.weights


def test_slices_point_at_the_tensors_bytes(tiny: TinyCheckpoint) -> None:
    checkpoint = open_checkpoint(tiny("moe", "mlx-4bit-g64", shards=2))
    for weight in checkpoint.weights.values():
        path = checkpoint.files[weight.data.file]
        with safetensors.safe_open(path, "np") as file:
            official = file.get_slice(weight.source)
            assert tuple(official.get_shape()) == weight.data.shape
        content = path.read_bytes()[weight.data.offset : weight.data.offset + weight.data.nbytes]
        assert content == dict(safetensors.deserialize(path.read_bytes()))[weight.source]["data"]


def test_nbytes_counts_what_is_used(tmp_path: Path) -> None:
    tensors = trunk(raw=True)
    folder = write_checkpoint(tmp_path / "m", tensors | {"model.visual.patch.weight": plain(100, 100)})
    assert open_checkpoint(folder).nbytes == sum(array.nbytes for _, array in tensors.values())


def test_unknown_names_are_kept_for_the_loader_to_refuse(tmp_path: Path) -> None:
    tensors = trunk(raw=True) | {"model.language_model.layers.0.surprise.bias": plain(3)}
    weights = open_checkpoint(write_checkpoint(tmp_path / "m", tensors)).weights
    assert weights["layers.0.surprise.bias"].source == "model.language_model.layers.0.surprise.bias"


@pytest.mark.parametrize("prefix", ["model.visual.", "vision_tower.", "visual.", "model.vision_tower."])
def test_the_vision_tower_is_ignored_and_named(tmp_path: Path, prefix: str) -> None:
    tensors = trunk(raw=True) | {f"{prefix}blocks.0.weight": plain(3, dtype="U8")}
    ignored = open_checkpoint(write_checkpoint(tmp_path / "m", tensors)).ignored
    assert ignored == {"vision tower": [f"{prefix}blocks.0.weight"]}


def test_tensors_that_the_index_leaves_out_are_ignored_and_named(tmp_path: Path) -> None:
    tensors = trunk(raw=True) | {"extra": plain(2)}
    shards = {"model-00001-of-00001.safetensors": list(tensors)}
    folder = write_checkpoint(tmp_path / "m", tensors, shards=shards)
    write_index(folder, {name: "model-00001-of-00001.safetensors" for name in tensors if name != "extra"})
    assert open_checkpoint(folder).ignored == {"not in the index": ["extra"]}


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a.bin", "..\\x.safetensors", 7, None]
)
def test_an_index_can_not_name_files_elsewhere(tmp_path: Path, name: Any) -> None:
    write_file(tmp_path / "outside.safetensors", trunk(raw=True))
    folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
    write_index(folder, dict.fromkeys(trunk(raw=True), name))
    with pytest.raises(CheckpointError, match=r"isn't a safetensors file of this folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 200_000, '{"weight_map": []}', '{"weight_map": {}}', "\xff"]
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_its_essentials_is_not_found(tmp_path: Path, missing: str) -> None:
    folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
    (folder / missing).unlink()
    with pytest.raises(CheckpointNotFoundError, match=missing):
        open_checkpoint(folder)


def test_the_demo_model_opens_whole_by_its_name() -> None:
    checkpoint = open_checkpoint("demo")
    assert checkpoint.mtp_source is not None
    assert checkpoint.config.eos_token_ids
    assert checkpoint.chat_template
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    prompt = ChatTemplate.from_checkpoint(checkpoint).render([{"role": "user", "content": "hi"}])
    tokens = tokenizer.encode(prompt, special_tokens=True)
    assert tokenizer.decode(tokens, skip_special=False) == prompt
    assert max(tokens) < checkpoint.config.vocab_size


@pytest.mark.parametrize("where", ["", "no/such/folder", "./nothing", "~nosuchuser/x", "a\0b", "x" * 5000])
def test_a_path_that_is_nothing_is_not_found(where: str) -> None:
    with pytest.raises(CheckpointNotFoundError) as error:
        open_checkpoint(where)
    assert isinstance(error.value, FileNotFoundError)
    assert repr(where) in str(error.value)


def test_a_path_object_is_never_taken_for_a_repository(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither an existing folder"):
        open_checkpoint(Path("owner/name"))


@pytest.mark.parametrize("value", [None, 3, ["x"]])
def test_something_else_than_a_path_is_an_invalid_argument(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="path or a repository id"):
        open_checkpoint(value)


def test_a_weight_file_in_place_of_the_folder_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
    with pytest.raises(CheckpointError, match="pass the folder"):
        open_checkpoint(folder / "model.safetensors")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_checkpoint(tmp_path / "models" / "m", trunk(raw=True))
    assert open_checkpoint("~/models/m").folder == tmp_path / "models" / "m"


def test_a_model_without_convolutions_is_refused(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in trunk(raw=True).items() if "conv1d" not in name}
    with pytest.raises(CheckpointError, match=r"no linear_attn\.conv1d"):
        open_checkpoint(write_checkpoint(tmp_path / "m", tensors))


@pytest.mark.parametrize("shape", [(128, 4), (128, 2, 4), (128, 4, 2), (128,), (128, 1, 3)])
def test_a_convolution_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = trunk(raw=True) | {"model.language_model.layers.0.linear_attn.conv1d.weight": plain(*shape)}
    with pytest.raises(CheckpointError, match=r"conv1d.weight: shape .* is neither"):
        open_checkpoint(write_checkpoint(tmp_path / "m", tensors))


def test_a_model_without_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in trunk(raw=True).items() if "embed" not in name}
    with pytest.raises(CheckpointError, match="no embed_tokens"):
        open_checkpoint(write_checkpoint(tmp_path / "m", tensors))


class TestSidecars:
    """The MTP head passed as ``mtp=``."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "base", trunk(raw=False))

    def test_it_replaces_the_checkpoints_own(self, tmp_path: Path) -> None:
        base = write_checkpoint(tmp_path / "both", trunk(raw=False) | mtp_head())
        sidecar = write_file(tmp_path / "s" / "mtp.safetensors", mtp_head())
        checkpoint = open_checkpoint(base, mtp=sidecar)
        assert checkpoint.mtp_source == str(sidecar)
        assert set(checkpoint.ignored["MTP head, replaced by the one passed as mtp="]) == set(mtp_head())

    def test_a_bare_extract_of_an_original_is_zero_centred(self, tmp_path: Path, base: Path) -> None:
        sidecar = write_file(tmp_path / "s" / "mtp.safetensors", mtp_head())
        assert open_checkpoint(base, mtp=sidecar).mtp_norm_shift is True

    @pytest.mark.parametrize("raw", [True, False], ids=["original", "converted"])
    def test_the_head_of_a_whole_checkpoint_follows_its_convolutions(
        self, tmp_path: Path, base: Path, raw: bool
    ) -> None:
        whole = write_checkpoint(tmp_path / "whole", trunk(raw) | mtp_head())
        checkpoint = open_checkpoint(base, mtp=whole)
        assert checkpoint.mtp_norm_shift is raw
        assert set(checkpoint.ignored["tensor of the MTP source that isn't part of its head"]) == set(
            trunk(raw)
        )

    def test_a_quantised_head_is_converted(self, tmp_path: Path, base: Path) -> None:
        head = mtp_head() | quantised("mtp.fc", HIDDEN, 2 * HIDDEN)
        side_config = {"quantization": {"bits": 4, "group_size": 32}}
        sidecar = write_checkpoint(tmp_path / "s", head, side_config)
        assert open_checkpoint(base, mtp=sidecar).mtp_norm_shift is False

    def test_a_quantised_head_in_the_checkpoint_may_have_formats_of_its_own(self, tmp_path: Path) -> None:
        tensors = (
            trunk(raw=False) | mtp_head() | quantised("mtp.fc", HIDDEN, 2 * HIDDEN, bits=8, mode="mxfp8")
        )
        declared = {
            "quantization": {"bits": 4, "group_size": 64},
            "mtplx_mtp_quantization": {"mode": "mxfp8", "bits": 8, "group_size": 32},
        }
        weight = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, CONFIG | declared)).weights[
            "mtp.fc"
        ]
        assert str(weight.quantization) == "mxfp8 8-bit, groups of 32"

    def test_without_a_head_it_is_refused(self, tmp_path: Path, base: Path) -> None:
        other = write_checkpoint(tmp_path / "other", trunk(raw=True))
        with pytest.raises(CheckpointError, match="holds no MTP head"):
            open_checkpoint(base, mtp=other)

    def test_of_another_model_it_is_refused(self, tmp_path: Path, base: Path) -> None:
        head = mtp_head() | {"mtp.fc.weight": plain(128, 256)}
        sidecar = write_file(tmp_path / "s" / "mtp.safetensors", head)
        with pytest.raises(CheckpointError, match=r"\[128, 256\], expected \[64, 128\].*another model"):
            open_checkpoint(base, mtp=sidecar)

    @pytest.mark.parametrize("lost", ["norm.weight", "pre_fc_norm_hidden.weight", "layers.0."])
    def test_incomplete_it_is_refused(self, tmp_path: Path, base: Path, lost: str) -> None:
        head = {name: tensor for name, tensor in mtp_head().items() if not name.startswith(f"mtp.{lost}")}
        sidecar = write_file(tmp_path / "s" / "mtp.safetensors", head)
        with pytest.raises(CheckpointError, match="MTP head"):
            open_checkpoint(base, mtp=sidecar)

    def test_that_does_not_exist_is_not_found(self, tmp_path: Path, base: Path) -> None:
        with pytest.raises(CheckpointNotFoundError):
            open_checkpoint(base, mtp=tmp_path / "nowhere")

    def test_of_a_large_repository_only_the_shards_with_the_head_are_fetched(
        self, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body, head = trunk(raw=True), mtp_head()
        names = list(body)
        first = [name for name in names if "layers.1" not in name]
        shards = {
            "model-00001-of-00003.safetensors": first,
            "model-00002-of-00003.safetensors": [name for name in names if name not in first],
            "model-00003-of-00003.safetensors": list(head),
        }
        remote = write_checkpoint(tmp_path / "remote", body | head, shards=shards)
        (remote / "model-00002-of-00003.safetensors").unlink()
        asked: list[list[str]] = []

        def snapshot_download(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
            asked.append(allow_patterns)
            return str(remote)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        checkpoint = open_checkpoint(base, mtp="owner/original")
        assert "*.safetensors" not in asked[0]
        assert asked[1] == ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], (
            "the head's shard, and one with a convolution to tell the layout"
        )
        assert checkpoint.mtp_norm_shift is True


class TestRepositories:
    """Hugging Face repositories, through the library's own cache."""

    @staticmethod
    def _open_offline(home: Path, repository: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import sys\n"
            "from lily_py.checkpoint import open_checkpoint\n"
            "from lily_py.errors import LilyError\n"
            "try: print(open_checkpoint(sys.argv[1]).folder)\n"
            "except LilyError as error: print(type(error).__name__, error)"
        )
        return subprocess.run(
            [sys.executable, "-c", program, repository],
            env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def test_a_cached_repository_opens_offline(self, tmp_path: Path) -> None:
        repository = tmp_path / "hub" / "models--owner--name"
        commit = "0123456789abcdef0123456789abcdef01234567"
        snapshot = write_checkpoint(repository / "snapshots" / commit, trunk(raw=True))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        result = self._open_offline(tmp_path, "owner/name")
        assert result.stdout.strip() == str(snapshot), result.stderr

    def test_an_uncached_repository_offline_says_why(self, tmp_path: Path) -> None:
        result = self._open_offline(tmp_path, "owner/name")
        assert result.stdout.startswith("CheckpointNotFoundError owner/name: not in the local cache"), result
        assert "HF_HUB_OFFLINE" in result.stdout

    def test_revision_patterns_and_progress_reach_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote = write_checkpoint(tmp_path / "remote", trunk(raw=True))
        asked: dict[str, Any] = {}

        def snapshot_download(repository: str, **keywords: Any) -> str:
            asked.update(keywords, repository=repository)
            return str(remote)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        open_checkpoint("owner/name", revision="v2", progress=False)
        assert (asked["repository"], asked["revision"]) == ("owner/name", "v2")
        assert {"*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])
        bar = asked["tqdm_class"](total=10, disable=False)
        assert bar.disable is True

    @pytest.mark.parametrize(
        ("error", "complaint"),
        [
            (OSError("disk full"), "download failed.*disk full"),
            (ValueError("bad"), "download failed"),
            (HFValidationError("bad id"), "download failed"),
        ],
    )
    def test_failures_of_the_library_are_errors_of_lily(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, complaint: str
    ) -> None:
        def snapshot_download(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(CheckpointError, match=complaint):
            open_checkpoint("owner/name")


class TestGenerationConfig:
    """Sampling defaults."""

    def test_they_come_from_the_file(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
        values = {
            "do_sample": True,
            "temperature": 1,
            "top_k": 20,
            "top_p": 0.95,
            "pad_token_id": None,
            "x": [1],
        }
        (folder / "generation_config.json").write_text(json.dumps(values))
        expected = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "x": [1]}
        assert open_checkpoint(folder).generation_config == expected

    def test_they_come_from_the_configuration_if_there_is_no_file(self, tmp_path: Path) -> None:
        changed = config() | {"generation_config": {"top_k": 7}}
        folder = write_checkpoint(tmp_path / "m", trunk(raw=True), changed)
        assert open_checkpoint(folder).generation_config == {"top_k": 7}

    def test_there_may_be_none(self, tmp_path: Path) -> None:
        assert open_checkpoint(write_checkpoint(tmp_path / "m", trunk(raw=True))).generation_config == {}

    @pytest.mark.parametrize(
        "values",
        [
            {"temperature": "hot"},
            {"temperature": -1},
            {"temperature": float("nan")},
            {"top_p": 1.5},
            {"top_k": 2.5},
            {"top_k": -1},
            {"repetition_penalty": 0},
            {"do_sample": 1},
            {"eos_token_id": "x"},
        ],
    )
    def test_impossible_values_are_refused(self, tmp_path: Path, values: dict[str, Any]) -> None:
        folder = write_checkpoint(tmp_path / "m", trunk(raw=True))
        (folder / "generation_config.json").write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(values))} must be"):
            open_checkpoint(folder)


class TestChatTemplate:
    """Where the template's source is looked for."""

    @staticmethod
    def _template(folder: Path, **files: Any) -> str | None:
        write_checkpoint(folder, trunk(raw=True))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name.replace("__", ".")).write_text(text)
        return open_checkpoint(folder).chat_template

    def test_the_jinja_file_comes_first(self, tmp_path: Path) -> None:
        files = {"chat_template__jinja": "J", "tokenizer_config__json": {"chat_template": "T"}}
        assert self._template(tmp_path / "m", **files) == "J"

    def test_a_string_in_the_tokenizers_configuration_is_taken(self, tmp_path: Path) -> None:
        assert self._template(tmp_path / "m", tokenizer_config__json={"chat_template": "T"}) == "T"

    def test_the_default_of_named_templates_is_taken(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
        assert self._template(tmp_path / "m", tokenizer_config__json={"chat_template": named}) == "D"

    def test_a_file_of_its_own_in_json_is_taken(self, tmp_path: Path) -> None:
        assert self._template(tmp_path / "m", chat_template__json={"chat_template": "C"}) == "C"

    def test_there_may_be_none(self, tmp_path: Path) -> None:
        assert self._template(tmp_path / "m") is None

    @pytest.mark.parametrize("value", [7, [], ["x"], [{"name": "tool_use", "template": "U"}], {"default": 3}])
    def test_something_else_is_refused(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(CheckpointError, match="chat_template must be"):
            self._template(tmp_path / "m", tokenizer_config__json={"chat_template": value})


def test_a_checkpoint_of_another_toolkit_is_refused_by_its_method(tmp_path: Path) -> None:
    changed = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write_checkpoint(tmp_path / "m", trunk(raw=True), changed)
    with pytest.raises(UnsupportedModelError, match="fp8"):
        open_checkpoint(folder)
