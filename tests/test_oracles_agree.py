"""The independent implementations agree: NumPy in float64, mlx-lm and transformers in float32.

What they agree on is what the engine is compared with, so a formula misread in one of them shows here first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracles import reference as numpy_reference
from oracles import textfiles
from oracles.dequantise import E2M1, E4M3, dequantise
from oracles.mlx_oracle import MlxOracle
from oracles.reference import MtpHead, Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

Tiny = Callable[..., Path]

FORMATS = [
    *(f"mlx-{bits}bit-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    "mlx-mxfp4",
    "mlx-mxfp8",
    "mlx-nvfp4",
    "mlx-mixed",
]
# options of `checkpoints.build` that change the layout, for a shape and a format
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("moe", "hf", {}),
    ("dense", "hf", {"dtype": "bfloat16"}),
    ("moe", "hf", {"dtype": "bfloat16", "mtp": True, "visual": True, "shards": 3}),
    ("moe", "mlx", {"dtype": "bfloat16"}),
    ("dense", "mlx", {"dtype": "float16", "mtp": "mtp/weights.safetensors", "visual": True}),
    ("moe", "mlx-4bit-g64", {"dtype": "bfloat16", "shards": 2}),
    ("moe", "mlx-8bit-g32", {"dtype": "float16", "mtp": True}),
    ("moe", "mlx-mixed", {"dtype": "bfloat16"}),
    ("top4", "hf", {"arch": "qwen3_next", "dtype": "bfloat16"}),
    ("top4", "mlx-4bit-g32", {"arch": "qwen3_next"}),
]


def ids_of(shape: str, length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A prompt of random tokens, among them rows of the vocabulary that have no token."""
    return np.random.default_rng(seed).integers(0, SHAPES[shape].vocab, length)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_agrees_with_mlx_lm_on_every_shape(tiny: Tiny, shape: str) -> None:
    path, ids = tiny(shape, "mlx"), ids_of(shape, 40)
    Reference(path).forward(ids).assert_close(MlxOracle(path).forward(ids))


@pytest.mark.parametrize("fmt", FORMATS)
def test_reference_agrees_with_mlx_lm_on_every_quantisation(tiny: Tiny, fmt: str) -> None:
    path, ids = tiny("moe_tied", fmt), ids_of("moe_tied", 24)
    Reference(path).forward(ids).assert_close(MlxOracle(path).forward(ids))


@pytest.mark.parametrize(("shape", "fmt", "options"), LAYOUTS)
def test_reference_agrees_with_mlx_lm_on_every_layout(
    tiny: Tiny, shape: str, fmt: str, options: dict[str, Any]
) -> None:
    path, ids = tiny(shape, fmt, **options), ids_of(shape, 24)
    Reference(path).forward(ids).assert_close(MlxOracle(path).forward(ids))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 64, 65, 300])
def test_reference_agrees_with_mlx_lm_at_every_prompt_length(tiny: Tiny, length: int) -> None:
    path, ids = tiny("moe", "mlx-4bit-g64"), ids_of("moe", length)
    Reference(path).forward(ids).assert_close(MlxOracle(path).forward(ids))


def test_reference_and_mlx_lm_agree_when_mlx_lm_reads_the_prompt_in_pieces(tiny: Tiny) -> None:
    path, ids = tiny("moe", "mlx"), ids_of("moe", 50)
    Reference(path).forward(ids).assert_close(MlxOracle(path).forward(ids, chunk=7))


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (5, 60), (64, 1), (2, 3, 40)])
def test_reference_continues_from_a_state_as_if_it_had_never_stopped(
    tiny: Tiny, pieces: tuple[int, ...]
) -> None:
    model = Reference(tiny("moe", "mlx"))
    ids = ids_of("moe", sum(pieces))
    result, logits, start = None, [], 0
    for piece in pieces:
        result = model.forward(ids[start : start + piece], after=result)
        logits.append(result.logits)
        start += piece
    assert result is not None
    whole = model.forward(ids)
    result.logits, result.hidden = np.concatenate(logits), whole.hidden
    whole.assert_close(result, scale=1e-6)


def test_float32_reference_stays_within_the_tolerances_and_in_float32(tiny: Tiny) -> None:
    path, ids = tiny("moe", "mlx-4bit-g64"), ids_of("moe", 300)
    single = Reference(path, dtype=np.float32).forward(ids)
    assert {single.logits.dtype, single.recurrent[0].dtype, single.keys[3].dtype} == {np.dtype(np.float32)}
    Reference(path).forward(ids).assert_close(single)


@pytest.mark.parametrize(
    ("attribute", "wrong"),
    [("eps", 1e-5), ("theta", 1e6), ("top_k", 3), ("rotary_dims", 32), ("is_raw", True)],
)
def test_a_wrong_constant_shows_far_beyond_the_tolerance(tiny: Tiny, attribute: str, wrong: object) -> None:
    path, ids = tiny("moe", "mlx"), ids_of("moe", 40)
    right, model = Reference(path).forward(ids), Reference(path)
    assert getattr(model, attribute) != wrong
    setattr(model, attribute, wrong)
    assert right.differences(model.forward(ids))["logits"] > 10 * TOLERANCES["logits"]


def test_a_key_head_given_to_the_wrong_value_heads_shows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ids = tiny("gdn_ratio2", "mlx"), ids_of("gdn_ratio2", 40)
    right = Reference(path).forward(ids)
    rule = numpy_reference.delta_rule

    def interleaved(q: Any, k: Any, *rest: Any) -> Any:
        return rule(q[:, [0, 2, 1, 3]], k[:, [0, 2, 1, 3]], *rest)

    monkeypatch.setattr(numpy_reference, "delta_rule", interleaved)
    assert right.differences(Reference(path).forward(ids))["logits"] > 100 * TOLERANCES["logits"]


def test_layouts_of_one_model_hold_the_same_numbers(tiny: Tiny) -> None:
    ids = ids_of("moe", 24)
    converted = Reference(tiny("moe", "mlx")).forward(ids)
    for options in ({}, {"experts": "separate"}, {"shards": 4}, {"arch": "qwen3_next"}):
        converted.assert_close(Reference(tiny("moe", "hf", **options)).forward(ids), scale=0.1)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_codes_unpack_as_mlx_unpacks_them(rng: np.random.Generator, bits: int) -> None:
    values = mx.array(rng.standard_normal((6, 256)).astype(np.float32))
    packed, scales, biases = (np.array(a) for a in mx.quantize(values, group_size=64, bits=bits))
    theirs = np.array(
        mx.dequantize(mx.array(packed), mx.array(scales), mx.array(biases), group_size=64, bits=bits)
    )
    np.testing.assert_allclose(dequantise(packed, scales, biases, 256), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_float_codes_decode_as_mlx_decodes_them(
    rng: np.random.Generator, mode: str, bits: int, group: int
) -> None:
    values = mx.array((rng.standard_normal((6, 256)) * np.logspace(-3, 3, 256)).astype(np.float32))
    packed, scales = mx.quantize(values, group_size=group, bits=bits, mode=mode)
    theirs = mx.dequantize(packed, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(dequantise(np.array(packed), np.array(scales), None, 256), np.array(theirs))


def test_small_floats_have_the_values_of_their_standards() -> None:
    assert E2M1[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.array_equal(E2M1[8:], -E2M1[:8])
    assert (E4M3[0x7E], E4M3[0x01], E4M3[0x08], E4M3[0x38]) == (448, 2**-9, 2**-6, 1)


@pytest.mark.parametrize("shape", ["moe", "dense"])
def test_mtp_head_gives_the_same_rows_at_once_and_one_by_one(tiny: Tiny, shape: str) -> None:
    model, ids = Reference(tiny(shape, "mlx", mtp=True)), ids_of(shape, 20)
    hidden = model.forward(ids).hidden
    whole = model.mtp(hidden, ids)
    assert whole.logits.shape == (19, SHAPES[shape].vocab)
    head = MtpHead(model)
    head.step(ids[1:11], hidden[:10])
    head.step(ids[:3], hidden[:3])
    head.trim(3)
    rows = [head.step(ids[i + 1 : i + 2], hidden[i : i + 1]).logits for i in range(10, 19)]
    np.testing.assert_allclose(np.concatenate(rows), whole.logits[10:], atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"fmt": "hf"},
        {"fmt": "hf", "experts": "separate"},
        {"fmt": "mlx", "experts": "fused"},
        {"fmt": "mlx", "experts": "separate"},
        {"fmt": "mlx", "mtp": "mtp.safetensors", "shards": 2},
    ],
)
def test_mtp_head_is_the_same_in_every_layout(tiny: Tiny, options: dict[str, Any]) -> None:
    ids = ids_of("moe", 12)
    plain = Reference(tiny("moe", "mlx", mtp=True))
    hidden = plain.forward(ids).hidden
    other = Reference(tiny("moe", **({"mtp": True} | options)))
    np.testing.assert_allclose(other.mtp(hidden, ids).logits, plain.mtp(hidden, ids).logits, atol=1e-5)


def test_mtp_head_is_read_from_a_sidecar_that_no_index_names(tiny: Tiny) -> None:
    path, ids = tiny("dense", "mlx", mtp="mtp/weights.safetensors"), ids_of("dense", 12)
    model = Reference(path, mtp=path / "mtp/weights.safetensors")
    hidden = model.forward(ids).hidden
    expected = Reference(tiny("dense", "mlx", mtp=True)).mtp(hidden, ids)
    np.testing.assert_array_equal(model.mtp(hidden, ids).logits, expected.logits)


def test_checkpoints_are_the_same_for_a_seed_and_differ_between_seeds(tiny: Tiny, tmp_path: Path) -> None:
    from oracles import checkpoints

    first = tiny("dense", "mlx-4bit-g64")
    again = checkpoints.build(tmp_path / "again", "dense", "mlx-4bit-g64")
    other = checkpoints.build(tmp_path / "other", "dense", "mlx-4bit-g64", seed=1)
    read = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert read[0] == read[1] != read[2]


def test_routing_spreads_over_the_experts(tiny: Tiny) -> None:
    chosen = Reference(tiny("moe", "mlx")).forward(ids_of("moe", 200)).experts
    for layer, choice in chosen.items():
        counts = np.bincount(choice.ravel(), minlength=8)
        assert counts.min() > 10, f"layer {layer} sends {counts} tokens to its experts"


def test_mlx_lm_loads_tokenizer_and_template(tiny: Tiny) -> None:
    from mlx_lm import load

    _, tokenizer = load(str(tiny("dense", "mlx-4bit-g64")))
    ids = textfiles.token_ids()
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the ö\n"}], add_generation_prompt=True
    )
    assert encoded[0] == ids["<|im_start|>"]
    assert list(encoded).count(ids["<think>"]) == 1
    assert (
        tokenizer.decode(encoded) == "<|im_start|>user\nthe ö\n<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert tokenizer.eos_token_id == ids["<|im_end|>"]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("shape", "fmt", "options"),
    [
        *((shape, "hf", {}) for shape in SHAPES),
        ("moe", "hf", {"dtype": "bfloat16", "experts": "separate", "shards": 2, "mtp": True}),
        ("moe", "mlx", {"dtype": "float16"}),
        ("moe", "mlx-4bit-g64", {"dtype": "bfloat16"}),
        ("dense", "mlx-3bit-g32", {}),
        ("moe", "mlx-mixed", {}),
        ("top4", "hf", {"arch": "qwen3_next"}),
        ("top4", "mlx-6bit-g32", {"arch": "qwen3_next"}),
    ],
)
def test_reference_agrees_with_transformers(
    tiny: Tiny, shape: str, fmt: str, options: dict[str, Any]
) -> None:
    from oracles.transformers_oracle import TransformersOracle

    path, ids = tiny(shape, fmt, **options), ids_of(shape, 70)
    expected, oracle = Reference(path).forward(ids), TransformersOracle(path)
    expected.assert_close(oracle.forward(ids))
    expected.assert_close(oracle.forward(ids, prefill=60))


@pytest.mark.oracle
@pytest.mark.parametrize("length", [1, 3, 64, 65, 300])
def test_reference_agrees_with_transformers_at_every_prompt_length(tiny: Tiny, length: int) -> None:
    from oracles.transformers_oracle import TransformersOracle

    path, ids = tiny("moe", "hf"), ids_of("moe", length)
    Reference(path).forward(ids).assert_close(TransformersOracle(path).forward(ids))


@pytest.mark.oracle
@pytest.mark.parametrize("shape", ["moe", "dense", "dense_untied", "head256"])
def test_mtp_head_agrees_with_transformers(tiny: Tiny, shape: str) -> None:
    from oracles.transformers_oracle import TransformersOracle

    path, ids = tiny(shape, "hf", mtp=True), ids_of(shape, 60)
    model = Reference(path)
    hidden = model.forward(ids).hidden
    ours, theirs = model.mtp(hidden, ids), TransformersOracle(path).mtp(hidden, ids)
    np.testing.assert_allclose(theirs.logits, ours.logits, atol=2e-5)
    np.testing.assert_allclose(theirs.hidden, ours.hidden, atol=2e-5)
