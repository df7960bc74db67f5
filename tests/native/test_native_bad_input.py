"""Damaged weights and impossible arguments: an error of lily's own tree that names the culprit, no crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from native_support import Tiny, exact_model, feed, ids_of, model_of, rewrite
from oracles import checkpoints
from oracles.shapes import SHAPES

from lily_py import _core
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import BackendError, CheckpointError, InvalidArgumentError, LilyError
from lily_py.loader import load_model

VOCABULARY = SHAPES["moe_tied"].vocab
GATE = "language_model.model.layers.0.mlp.gate"
EXPERTS = "language_model.model.layers.1.mlp.switch_mlp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of its own for a test to damage."""
    return checkpoints.build(tmp_path / "model", "moe_tied", "mlx-4bit-g64", dtype="bfloat16")


def greedy(**options: Any) -> _core.Sampler:
    values: dict[str, Any] = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [], "seed": 0,
        "vocabulary": VOCABULARY,
    }  # fmt: skip
    return _core.Sampler(**(values | options))


def set_first(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name].reshape(-1)[...] = value

    return change


@pytest.mark.parametrize("ablate", [(), ("integer_dot",)])
@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.embed_tokens.scales",
        "language_model.model.layers.0.linear_attn.in_proj_qkv.scales",
        "language_model.model.layers.0.linear_attn.in_proj_z.biases",
        "language_model.model.layers.3.self_attn.q_proj.scales",
        "language_model.model.layers.3.self_attn.v_proj.biases",
        "language_model.model.layers.2.mlp.gate.scales",
        f"{EXPERTS}.down_proj.scales",
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_reported_when_a_token_is_drawn(
    folder: Path, name: str, value: float, ablate: tuple[str, ...]
) -> None:
    rewrite(folder, set_first(name, value))
    model = model_of(folder, ablate=ablate)
    sequence = model.new_sequence()
    model.forward(sequence, ids_of(VOCABULARY, 12))
    with pytest.raises(BackendError, match="not numbers"):
        model.step(sequence, 3, greedy())


@pytest.mark.parametrize("suffix", ["A_log", "dt_bias", "norm.weight", "conv1d.weight"])
def test_small_parameters_that_are_not_finite_are_refused_at_loading(folder: Path, suffix: str) -> None:
    name = f"language_model.model.layers.1.linear_attn.{suffix}"
    rewrite(folder, set_first(name, np.nan))
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\." + suffix):
        model_of(folder)


REMOVED = [
    "language_model.model.layers.0.linear_attn.A_log",
    "language_model.model.layers.2.linear_attn.out_proj",
    "language_model.model.layers.3.self_attn.k_norm.weight",
    "language_model.model.layers.3.input_layernorm.weight",
    f"{EXPERTS}.up_proj",
    "language_model.model.layers.1.mlp.shared_expert.down_proj",
    "language_model.model.norm.weight",
]


@pytest.mark.parametrize("name", REMOVED)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    def remove(tensors: dict[str, Any]) -> None:
        gone = [key for key in tensors if key == name or key.startswith(name + ".")]
        assert gone
        for key in gone:
            del tensors[key]

    rewrite(folder, remove)
    canonical = name.removeprefix("language_model.model.").removesuffix(".weight")
    with pytest.raises(CheckpointError, match=canonical.replace("switch_mlp", "experts").replace(".", r"\.")):
        model_of(folder)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("language_model.model.layers.0.linear_attn.dt_bias", 0),
        ("language_model.model.layers.0.linear_attn.norm.weight", 0),
        ("language_model.model.layers.3.self_attn.q_norm.weight", 0),
        ("language_model.model.layers.3.self_attn.o_proj", 0),
        ("language_model.model.layers.0.linear_attn.in_proj_z", 0),
        (f"{EXPERTS}.gate_proj", 0),
        (f"{EXPERTS}.gate_proj", 1),
        ("language_model.model.embed_tokens", 0),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path, name: str, axis: int) -> None:
    def halve(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key == name or key.startswith(name + ".")]:
            tensors[key] = np.split(tensors[key], 2, axis)[0]

    rewrite(folder, halve)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*expected"):
        model_of(folder)


def test_a_tensor_the_architecture_has_no_place_for_is_named(folder: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["language_model.model.layers.0.mlp.extra_gate.weight"] = np.zeros((4, 128), np.float32)

    rewrite(folder, add)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.extra_gate"):
        model_of(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1, -64])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        model_of(folder)


def test_a_file_that_shrinks_between_reading_its_header_and_mapping_it_is_refused(folder: Path) -> None:
    opened = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(opened)


@pytest.mark.parametrize("dtype", ["U32", "U8"])
def test_a_norm_stored_as_integers_is_named(folder: Path, dtype: str) -> None:
    name = "language_model.model.layers.3.self_attn.q_norm.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = np.ones(tensors[name].shape, np.uint32 if dtype == "U32" else np.uint8)

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        model_of(folder)


def test_scales_of_another_type_than_biases_are_named(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{GATE}.scales"] = np.asarray(tensors[f"{GATE}.scales"]).astype(np.float32)
        assert tensors[f"{GATE}.biases"].dtype == ml_dtypes.bfloat16

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=GATE.replace(".", r"\.")):
        model_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 24}, "head_dim is 24"),
        ({"gdn_dim": 24}, "linear_key_head_dim is 24"),
        ({"head_dim": 1024, "heads": 1, "kv_heads": 1, "rotary_factor": 1.0}, "covers 1024 dimensions"),
    ],
)
def test_head_sizes_that_the_kernels_cannot_take_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Vectors have 16 lanes, rotations at most 256 pairs: other sizes would be read past a head's end."""
    shape = replace(SHAPES["dense"], **change)
    with pytest.raises(CheckpointError, match=message):
        model_of(checkpoints.build(tmp_path / "model", shape, "mlx"))


@pytest.fixture
def model(tiny: Tiny) -> _core.Model:
    return exact_model(tiny("moe_tied", "mlx-4bit-g64"), max_context=100)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused_and_nothing_is_fed(model: _core.Model, token: int) -> None:
    sequence = model.new_sequence()
    ids = np.array([1, 2, token], np.int32)
    for call in (
        lambda: model.forward(sequence, ids),
        lambda: model.step(sequence, token, greedy()),
        lambda: model.forward_each([sequence], ids[2:]),
    ):
        with pytest.raises(InvalidArgumentError, match=str(token)):
            call()
    assert sequence.length == 0
    expected = feed(model, model.new_sequence(), ids[:2])
    np.testing.assert_array_equal(feed(model, sequence, ids[:2]), expected)


def test_an_empty_prompt_is_refused(model: _core.Model) -> None:
    with pytest.raises(InvalidArgumentError, match="no tokens"):
        model.forward(model.new_sequence(), np.zeros(0, np.int32))
    with pytest.raises(InvalidArgumentError):
        model.forward_each([], np.zeros(0, np.int32))


def test_a_context_that_would_overflow_is_refused_before_anything_is_fed(model: _core.Model) -> None:
    sequence = model.new_sequence()
    with pytest.raises(InvalidArgumentError, match=r"101.*100"):
        model.forward(sequence, ids_of(VOCABULARY, 101))
    assert sequence.length == 0
    model.forward(sequence, ids_of(VOCABULARY, 100))
    for call in (
        lambda: model.forward(sequence, ids_of(VOCABULARY, 1)),
        lambda: model.step(sequence, 1, greedy()),
        lambda: model.forward_each([sequence], ids_of(VOCABULARY, 1)),
    ):
        with pytest.raises(InvalidArgumentError, match=r"101.*100"):
            call()
    assert sequence.length == 100


def test_a_sequence_twice_in_a_step_or_too_few_tokens_for_the_sequences_are_refused(
    model: _core.Model,
) -> None:
    first, second = model.new_sequence(), model.new_sequence()
    with pytest.raises(InvalidArgumentError, match="once"):
        model.forward_each([first, second, first], ids_of(VOCABULARY, 3))
    with pytest.raises(InvalidArgumentError, match="one token"):
        model.forward_each([first, second], ids_of(VOCABULARY, 3))
    assert first.length == second.length == 0


def test_more_sequences_than_a_chunk_are_refused(tiny: Tiny) -> None:
    model = exact_model(tiny("moe_tied", "mlx-4bit-g64"), chunk=2)
    with pytest.raises(InvalidArgumentError, match="2"):
        model.forward_each([model.new_sequence() for _ in range(3)], ids_of(VOCABULARY, 3))


@pytest.mark.parametrize(
    "options",
    [{"chunk": 0}, {"chunk": -1}, {"kv_dtype": "float16"}],
)
def test_impossible_options_are_refused(tiny: Tiny, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        model_of(tiny("moe_tied", "mlx-4bit-g64"), **options)


def test_an_unknown_ablation_is_refused_by_name(tiny: Tiny) -> None:
    with pytest.raises(InvalidArgumentError, match=r"integer_dots.*integer_dot, byte_dot"):
        model_of(tiny("moe_tied", "mlx-4bit-g64"), ablate=("integer_dots",))


@pytest.mark.parametrize(
    "options", [{"backend": "cuda"}, {"ablate": ("avx512vnni", "avxvnni", "avx2", "generic")}]
)
def test_a_backend_that_is_not_here_is_refused(tiny: Tiny, options: dict[str, Any]) -> None:
    with pytest.raises(BackendError):
        model_of(tiny("moe_tied", "mlx-4bit-g64"), **options)


@pytest.mark.parametrize("layer", [-1, 1, 100])
def test_states_of_layers_that_do_not_exist_are_refused(model: _core.Model, layer: int) -> None:
    sequence = model.new_sequence()
    model.forward(sequence, ids_of(VOCABULARY, 3))
    with pytest.raises(LilyError):
        sequence.keys_values(layer)
    for read in (sequence.recurrent_state, sequence.conv_state):
        with pytest.raises(LilyError):
            read(layer if layer != 1 else 3)


@pytest.mark.parametrize("name", ["dense", "gdn_ratio4", "head256", "kv_ratio8"])
def test_a_sequence_of_another_model_is_refused(model: _core.Model, tiny: Tiny, name: str) -> None:
    other = exact_model(tiny(name, "mlx-4bit-g64")).new_sequence()
    own = model.new_sequence()
    for call in (
        lambda: model.forward(other, ids_of(VOCABULARY, 3)),
        lambda: model.forward_each([own, other], ids_of(VOCABULARY, 2)),
        lambda: model.step(other, 1, greedy()),
    ):
        with pytest.raises(InvalidArgumentError, match="model"):
            call()
    assert own.length == other.length == 0


def test_a_sequence_with_another_kind_of_cache_is_refused(model: _core.Model, tiny: Tiny) -> None:
    half = exact_model(tiny("moe_tied", "mlx-4bit-g64"), kv_dtype="bfloat16").new_sequence()
    with pytest.raises(InvalidArgumentError, match="model"):
        model.forward(half, ids_of(VOCABULARY, 3))
