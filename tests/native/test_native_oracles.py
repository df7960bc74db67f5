"""The native core against NumPy in float64 and mlx-lm in float32: logits and every kind of state.

Deliberate rounding is switched off here (fp32 products of quantised weights, fp32 keys and values): what is
left is the rounding of fp32 arithmetic, for which the oracles' own tolerances hold (1e-4 on logits of about
10; see `oracles.result.TOLERANCES` for the derivation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_support import ALL_SHAPES, Ids, Tiny, assert_agrees, exact_model, feed, ids_of, result_of, run
from oracles.mlx_oracle import MlxOracle
from oracles.result import Result
from oracles.shapes import SHAPES, Shape

ReferenceOf = Callable[[Path, Ids], Result]

FORMATS = [
    *(f"mlx-{bits}bit-g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    *("mlx-mxfp4", "mlx-mxfp8", "mlx-nvfp4", "mlx-mixed", "mlx", "hf"),
]
FORMAT_OF = {
    "narrow": "mlx-4bit-g32",
    "thin": "mlx-5bit-g32",
    "ragged": "mlx",
}  # widths that 64 doesn't divide
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("moe", "hf", {"dtype": "bfloat16", "mtp": True, "visual": True, "shards": 3}),
    ("dense", "hf", {"dtype": "bfloat16"}),
    ("moe", "hf", {"dtype": "float16", "experts": "separate"}),
    ("moe", "mlx", {"dtype": "bfloat16"}),
    ("moe", "mlx", {"dtype": "float16", "experts": "fused"}),
    ("moe", "mlx", {"experts": "separate"}),
    ("dense", "mlx", {"dtype": "float16", "mtp": "mtp/weights.safetensors", "visual": True}),
    ("moe", "mlx-4bit-g64", {"dtype": "bfloat16", "shards": 2}),
    ("moe", "mlx-8bit-g32", {"dtype": "float16", "mtp": True}),
    ("moe", "mlx-mixed", {"dtype": "bfloat16"}),
    ("top4", "hf", {"arch": "qwen3_next", "dtype": "bfloat16"}),
    ("top4", "mlx-4bit-g32", {"arch": "qwen3_next"}),
    ("gdn_ratio4", "mlx-mixed", {"arch": "qwen3_next", "dtype": "bfloat16"}),
]


def attention_of(shape: Shape) -> list[bool]:
    return [shape.is_attention(layer) for layer in range(shape.layers)]


@pytest.mark.parametrize("name", ALL_SHAPES)
def test_every_shape_agrees_with_the_reference(tiny: Tiny, reference: ReferenceOf, name: str) -> None:
    shape = ALL_SHAPES[name]
    path, ids = tiny(shape, FORMAT_OF.get(name, "mlx-4bit-g64")), ids_of(shape.vocab, 40)
    assert_agrees(run(exact_model(path), ids, attention_of(shape)), reference(path, ids))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_number_format_agrees_with_the_reference(tiny: Tiny, reference: ReferenceOf, fmt: str) -> None:
    shape = replace(SHAPES["moe"], layers=4)
    path, ids = tiny(shape, fmt), ids_of(shape.vocab, 24)
    assert_agrees(run(exact_model(path), ids, attention_of(shape)), reference(path, ids))


@pytest.mark.parametrize(("name", "fmt", "options"), LAYOUTS)
def test_every_layout_agrees_with_the_reference(
    tiny: Tiny, reference: ReferenceOf, name: str, fmt: str, options: dict[str, Any]
) -> None:
    shape = SHAPES[name]
    path, ids = tiny(name, fmt, **options), ids_of(shape.vocab, 24)
    assert_agrees(run(exact_model(path), ids, attention_of(shape)), reference(path, ids))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 64, 65, 300])
def test_every_prompt_length_agrees_with_the_reference(
    tiny: Tiny, reference: ReferenceOf, length: int
) -> None:
    shape = SHAPES["moe"]
    path, ids = tiny("moe", "mlx-4bit-g64"), ids_of(shape.vocab, length)
    assert_agrees(run(exact_model(path), ids, attention_of(shape)), reference(path, ids))


def test_decoding_token_by_token_agrees_with_the_reference(tiny: Tiny, reference: ReferenceOf) -> None:
    shape = SHAPES["moe"]
    path, ids = tiny("moe", "mlx-4bit-g64"), ids_of(shape.vocab, 65)
    model = exact_model(path)
    sequence = model.new_sequence()
    rows = [feed(model, sequence, ids[i : i + 1]) for i in range(len(ids))]
    native = result_of(sequence, np.concatenate(rows), attention_of(shape))
    assert_agrees(native, reference(path, ids))


@pytest.mark.parametrize(
    ("name", "fmt", "length"),
    [
        ("moe", "mlx-4bit-g64", 300),
        ("dense_untied", "mlx-6bit-g32", 64),
        ("gdn_ratio3", "mlx-8bit-g64", 65),
        ("gdn_ratio4", "mlx-3bit-g64", 65),
        ("top8", "mlx-mixed", 65),
        ("head256", "mlx-5bit-g128", 64),
        ("family_heads", "mlx-4bit-g64", 65),
        ("odd", "mlx-2bit-g64", 40),
        ("interval2", "mlx", 65),
    ],
)
def test_agrees_with_mlx_lm(tiny: Tiny, name: str, fmt: str, length: int) -> None:
    shape = SHAPES[name]
    path, ids = tiny(name, fmt), ids_of(shape.vocab, length)
    assert_agrees(run(exact_model(path), ids, attention_of(shape)), MlxOracle(path).forward(ids))
