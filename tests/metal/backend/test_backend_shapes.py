"""Tiny random checkpoints of every family shape and format through the Metal backend, simulated.

With fp32 activations and caches the logits are compared with float64 arithmetic within the distance that any
correct fp32 implementation has (`oracles.result.TOLERANCES`); with bf16, as shipped, with the same within the
rounding of bf16 (2^-8 of an activation, over four to eight layers), and the greedy text of 200 tokens with
the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, continued, ids_of, load, state_bytes
from oracles import checkpoints
from oracles.reference import Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES

# Models whose experts are all chosen: rounding changes numbers, but no choice.
SMOOTH = ("dense", "gdn_ratio3", "family_heads", "kv_ratio6", "interval2", "top_all")
BF16 = 0.03  # root mean square of the error over that of the logits


pytestmark = pytest.mark.usefixtures("fast")


def logits_of(model: Any, ids: Any, pieces: tuple[int, ...]) -> tuple[Any, Any]:
    """The logits of every token fed in pieces, and the sequence."""
    sequence, found, at = model.new_sequence(), [], 0
    for size in pieces:
        found.append(model.forward(sequence, ids[at : at + size], all=True))
        at += size
    return np.concatenate(found), sequence


QUICK = ("moe", "family_heads")


def marked(names: Any) -> list[Any]:
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", marked(SHAPES))
def test_logits_and_text_of_every_shape(tiny: Callable[..., Path], name: str) -> None:
    """A prompt in chunks and what follows: logits, and 200 tokens of greedy text as on the CPU."""
    shape = SHAPES[name]
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(shape.vocab, 75)
    model = load(folder, **EXACT)
    found, _ = logits_of(model, ids, (40, 30, 5))
    np.testing.assert_allclose(found, Reference(folder).forward(ids).logits, atol=TOLERANCES["logits"])
    cpu = load(folder, "cpu", kv_dtype="float32", ablate=("integer_dot",))
    texts = [continued(m, m.new_sequence(), ids, 200, shape.vocab) for m in (model, cpu)]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTH)
def test_bf16_logits_are_within_its_rounding(tiny: Callable[..., Path], name: str) -> None:
    shape = SHAPES[name]
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(shape.vocab, 75)
    found, _ = logits_of(load(folder), ids, (8, 60, 7))
    wanted = Reference(folder).forward(ids).logits
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < BF16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("mlx-mxfp4", "bfloat16"),
        ("mlx-4bit-g64", "float16"),
        ("mlx-4bit-g32", "float32"),
        ("mlx-6bit-g64", "bfloat16"),
        ("mlx-3bit-g128", "bfloat16"),
        ("hf", "bfloat16"),
    ],
)
def test_number_formats(tiny: Callable[..., Path], fmt: str, dtype: str) -> None:
    shape = replace(SHAPES["moe"], layers=4)
    folder = tiny(shape, fmt, dtype=dtype)
    ids = ids_of(shape.vocab, 20)
    found, _ = logits_of(load(folder, **EXACT), ids, (9, 8, 3))
    np.testing.assert_allclose(found, Reference(folder).forward(ids).logits, atol=TOLERANCES["logits"])


def test_two_sequences_in_one_pass_are_each_as_alone(tiny: Callable[..., Path]) -> None:
    """Also when their lengths lie on both sides of the end of a page, and one goes back."""
    shape = SHAPES["moe"]
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), **EXACT)
    prompts = [ids_of(shape.vocab, length, seed=length) for length in (63, 5)]
    together, alone = ([model.new_sequence() for _ in prompts] for _ in range(2))
    for sequences in (together, alone):
        for sequence, prompt in zip(sequences, prompts, strict=True):
            model.forward(sequence, prompt)
            sequence.snapshot()
    for tokens in ([3, 4], [5, 6], [7, 8]):
        ids = np.array(tokens, np.int32)
        rows = model.forward_each(together, ids)
        single = [model.forward(s, ids[i : i + 1]) for i, s in enumerate(alone)]
        np.testing.assert_array_equal(rows, single)
    layers = [shape.is_attention(layer) for layer in range(shape.layers)]
    for pair in zip(together, alone, strict=True):
        assert len({tuple(state_bytes(s, layers.count(False), layers.count(True))) for s in pair}) == 1
    together[0].truncate(63)
    fresh = model.new_sequence()
    model.forward(fresh, prompts[0])
    more = ids_of(shape.vocab, 5, seed=9)
    np.testing.assert_array_equal(model.forward(together[0], more), model.forward(fresh, more))


@pytest.mark.slow
def test_a_cache_that_grows_keeps_what_it_holds(tiny: Callable[..., Path]) -> None:
    """Twenty sequences of two pages are more than the pool begins with; a step is under way as it grows."""
    shape = replace(SHAPES["moe"], layers=4)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), **EXACT)
    first = model.new_sequence()
    said = continued(model, first, ids_of(shape.vocab, 60), 10, shape.vocab)
    others = [model.new_sequence() for _ in range(20)]
    for i, other in enumerate(others):
        model.forward(other, ids_of(shape.vocab, 66, seed=i))
    again = model.new_sequence()
    assert continued(model, again, ids_of(shape.vocab, 60), 10, shape.vocab) == said
    layers = [shape.is_attention(layer) for layer in range(shape.layers)]
    sizes = (layers.count(False), layers.count(True))
    assert state_bytes(first, *sizes) == state_bytes(again, *sizes)


def test_a_model_without_kernels_is_refused_by_name(
    metal_lily: ModuleType, tiny: Callable[..., Path]
) -> None:
    folder = tiny(replace(SHAPES["dense"], hidden=144, dense_width=144), "mlx", dtype="float32")
    with pytest.raises(metal_lily.BackendError, match=r"embed_tokens.*144 numbers.*multiples of 32"):
        load(folder)


MIXTURES = {
    "moe": ("moe", checkpoints.MIXED),
    "dense": ("dense", checkpoints.MIXED),
    "experts": ("moe", (("*.switch_mlp.up_proj", checkpoints.Quant(8, 64)),)),
    "groups": ("moe", (("*.switch_mlp.gate_proj", checkpoints.Quant(4, 32)),)),
}
"""Router and its gate, gate and up of the shared expert, q, k and v; gate and up of a dense layer, of the
routed experts; the same codes in other groups."""


@pytest.mark.parametrize("mixture", MIXTURES)
def test_matrices_of_different_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixture: str) -> None:
    """What can't be read together is a launch of its own: one, two and nine rows, then the CPU's text."""
    name, overrides = MIXTURES[mixture]
    monkeypatch.setattr(checkpoints, "MIXED", overrides)
    shape = replace(SHAPES[name], layers=4)
    folder = checkpoints.build(tmp_path, shape, "mlx-mixed", dtype="bfloat16")
    ids, model = ids_of(shape.vocab, 20), load(folder, **EXACT)
    found, _ = logits_of(model, ids, (9, 1, 2, 8))
    np.testing.assert_allclose(found, Reference(folder).forward(ids).logits, atol=TOLERANCES["logits"])
    cpu = load(folder, "cpu", kv_dtype="float32", ablate=("integer_dot",))
    texts = [continued(m, m.new_sequence(), ids, 30, shape.vocab) for m in (model, cpu)]
    assert texts[0] == texts[1]


def test_rows_share_the_launches_of_different_formats(tiny: Callable[..., Path]) -> None:
    """A router and a gate of different formats are two launches, whatever the rows."""
    shape = replace(SHAPES["moe"], layers=4)
    model = load(tiny(shape, "mlx-mixed", dtype="bfloat16"))
    launches = []
    for rows in (1, 5, 8):
        before = model.counts["launches"]
        model.forward(model.new_sequence(), ids_of(shape.vocab, rows))
        launches.append(model.counts["launches"] - before)
    assert launches[0] == launches[1] == launches[2]


def test_unknown_ablations_are_refused(metal_lily: ModuleType, tiny: Callable[..., Path]) -> None:
    with pytest.raises(metal_lily.InvalidArgumentError, match=r"nothing named 'gqa'.*gqa_packing"):
        load(tiny(SHAPES["dense"], "mlx-4bit-g64", dtype="bfloat16"), ablate=("gqa",))
