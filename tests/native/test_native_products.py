"""The matrix kernels repeat their documented arithmetic bit for bit, and the rounding costs what it implies.

Layers whose output projections are zero leave the embedding as it is, so the logits are one product of a row
that is known exactly: head x norm(embedding). That isolates the kernel in every number format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_arithmetic import (
    RoundedReference,
    expanded_weights,
    float_product,
    integer_product,
    rms_norm,
    round_rows,
)
from native_support import FLOATS_ONLY, Ids, Tiny, feed, ids_of, model_of, rewrite, run
from oracles import checkpoints, tensorfile
from oracles.result import Result
from oracles.shapes import SHAPES

ReferenceOf = Callable[[Path, Ids], Result]

SILENCED = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
PLAIN: Any = [("embed_tokens", None), ("*.out_proj", None), ("*.o_proj", None), ("*.down_proj", None)]
HEAD_FORMATS = [
    *(f"mlx-{bits}bit-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    *("mlx-mxfp4", "mlx-nvfp4"),
]
FLOAT_FORMATS = [
    ("mlx-mxfp8", "float32", 384),
    ("mlx", "float32", 384),
    ("mlx", "bfloat16", 384),
    ("mlx", "float16", 384),
    ("mlx", "bfloat16", 144),
    ("mlx-4bit-g64", "bfloat16", 384),
    ("mlx-3bit-g32", "float32", 96),
    ("mlx-nvfp4", "float32", 160),
]


def _silence(tensors: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith(SILENCED):
            tensors[name] = np.zeros_like(tensors[name])


@pytest.fixture(scope="module")
def head_only(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model whose logits are its head times the normed embedding; 307 outputs are no multiple of 16."""
    built: dict[tuple[str, int, str], Path] = {}

    def get(fmt: str, hidden: int, dtype: str = "float32") -> Path:
        if (fmt, hidden, dtype) not in built:
            shape = replace(SHAPES["dense_untied"], layers=1, interval=2, hidden=hidden, vocab=307)
            folder = tmp_path_factory.mktemp("head")
            checkpoints.build(folder, shape, fmt, dtype=dtype, overrides=PLAIN)
            rewrite(folder, _silence)
            built[fmt, hidden, dtype] = folder
        return built[fmt, hidden, dtype]

    return get


def _head_inputs(folder: Path, ids: Ids) -> tuple[Any, dict[str, Any]]:
    """The rows the head reads, and the head's tensors."""
    tensors = tensorfile.read(folder / "model.safetensors")
    embedding = np.asarray(tensors["language_model.model.embed_tokens.weight"]).astype(np.float32)
    norm = np.asarray(tensors["language_model.model.norm.weight"]).astype(np.float32)
    prefix = "language_model.lm_head."
    parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return rms_norm(embedding[ids], norm, 1e-6), parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", HEAD_FORMATS)
def test_integer_products_are_exactly_the_documented_arithmetic(
    head_only: Callable[..., Path], fmt: str, dtype: str
) -> None:
    folder, ids = head_only(fmt, 384, dtype), ids_of(307, 20)
    rows, head = _head_inputs(folder, ids)
    expected = integer_product(rows, head["weight"], head["scales"], head.get("biases"))
    for chunk in (20, 5, 1):  # many rows, few rows, one row
        model = model_of(folder, chunk=chunk)
        np.testing.assert_array_equal(feed(model, model.new_sequence(), ids), expected)


@pytest.mark.parametrize("fmt", ["mlx-2bit-g32", "mlx-4bit-g32", "mlx-5bit-g32", "mlx-mxfp4", "mlx-nvfp4"])
def test_a_width_that_ends_in_half_a_block_is_multiplied_exactly(
    head_only: Callable[..., Path], fmt: str
) -> None:
    folder, ids = head_only(fmt, 96), ids_of(307, 20)
    rows, head = _head_inputs(folder, ids)
    expected = integer_product(rows, head["weight"], head["scales"], head.get("biases"))
    for chunk in (20, 3):
        model = model_of(folder, chunk=chunk)
        np.testing.assert_array_equal(feed(model, model.new_sequence(), ids), expected)


@pytest.mark.parametrize(("fmt", "dtype", "hidden"), FLOAT_FORMATS)
def test_float_products_are_exactly_the_documented_arithmetic(
    head_only: Callable[..., Path], fmt: str, dtype: str, hidden: int
) -> None:
    folder, ids = head_only(fmt, hidden, dtype), ids_of(307, 11)
    rows, head = _head_inputs(folder, ids)
    weights = expanded_weights(head["weight"], head.get("scales"), head.get("biases"), hidden)
    expected = float_product(rows, weights)
    for chunk in (11, 2, 1):
        model = model_of(folder, chunk=chunk, ablate=FLOATS_ONLY)
        np.testing.assert_array_equal(feed(model, model.new_sequence(), ids), expected)


def test_rounded_rows_stay_within_half_a_step_and_rarely_need_it() -> None:
    """The emulation itself: a uniform error of at most half a step, so step / sqrt(12) in the mean square."""
    x = np.random.default_rng(0).standard_normal((200, 256)).astype(np.float32)
    integers, scales = round_rows(x)
    step = np.repeat(scales, 64, -1).astype(np.float64)
    error = (integers * step - x) / step
    assert np.abs(error).max() <= 0.5 + 1e-2
    assert np.sqrt(np.mean(error**2)) == pytest.approx(1 / np.sqrt(12), rel=0.01)
    assert np.abs(integers).max() == 32639


NOISE_CASES: list[tuple[str, str]] = [
    *((name, "mlx-4bit-g64") for name in SHAPES),
    *(("moe", f"mlx-{bits}bit-g64") for bits in (2, 3, 5, 6, 8)),
    *(("moe", fmt) for fmt in ("mlx-4bit-g32", "mlx-4bit-g128", "mlx-mixed", "mlx-mxfp4", "mlx-nvfp4")),
]


def _root_mean_square(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize(("name", "fmt"), NOISE_CASES)
def test_integer_products_cost_as_much_accuracy_as_rounding_their_inputs(
    tiny: Tiny, reference: ReferenceOf, name: str, fmt: str
) -> None:
    """Through a whole model roundings differ at ties, so errors are compared as noise, not number by number.

    The float64 reference with rounded inputs has the error that the rounding implies; the backend's must be
    as large, no larger: an excess shows an error of the kernels, a lack that the path wasn't taken.
    """
    shape, path = SHAPES[name], tiny(name, fmt)
    attention = [shape.is_attention(layer) for layer in range(shape.layers)]
    runs = []
    for seed in range(3):  # a near-tie of experts may flip in one prompt: the middle one of three counts
        ids = ids_of(shape.vocab, 40, seed=seed)
        exact, rounded = reference(path, ids), RoundedReference(path).forward(ids)
        native = run(model_of(path), ids, attention)
        expected = _root_mean_square(rounded.logits - exact.logits)
        measured = _root_mean_square(native.logits - exact.logits)
        runs.append((measured / expected, seed, exact, rounded, native))
    ratio, _, exact, rounded, native = sorted(runs, key=lambda item: item[:2])[1]
    assert 0.8 < ratio < 1.25, f"the error of the logits is {ratio:.2f} times what rounding implies"
    worst = np.abs(rounded.logits - exact.logits).max()
    assert np.abs(native.logits - exact.logits).max() < 2 * worst
    for kind in ("recurrent", "conv", "keys", "values"):
        for layer, values in getattr(exact, kind).items():
            implied = np.abs(getattr(rounded, kind)[layer] - values).max()
            found = np.abs(getattr(native, kind)[layer] - values).max()
            assert found < 2 * implied + 1e-6, f"{kind} of layer {layer}: {found:.2e} against {implied:.2e}"
