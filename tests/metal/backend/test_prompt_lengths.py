"""Prompts of every length through `Engine.load(..., backend="metal")`, simulated, beside `backend="cpu"`.

With fp32 activations both are within fp32 rounding of each other (`oracles.result.TOLERANCES`). As shipped,
with bf16 activations, they are within its rounding as long as it changes no choice of experts; so there all
are chosen. The lengths lie on both sides of what the few-row kernels take, of tiles, pages and chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, all_chosen, ids_of, load, state_bytes
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES, Shape

LENGTHS = (1, 8, 9, 16, 17, 63, 64, 65, 255, 256, 257, 1000)
CPU_EXACT = {"kv_dtype": "float32", "ablate": ("integer_dot",)}
SHIPPED = 0.05  # of the largest logit
CHUNKS = (64, 256, 4096)

Tiny = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("fast")


def narrow(name: str, heads: int = 2) -> Shape:
    """One layer of each kind, and no wider than what the shape is about: the simulator is slow.

    `heads` query heads share keys and values, unless the shape is about their number.
    """
    shape = SHAPES[name]
    ratio = shape.value_heads // shape.key_heads
    key_heads = 2 if ratio % 2 else 1  # keeps the value width a multiple of 64
    sizes = {"layers": 2, "interval": 2, "key_heads": key_heads, "value_heads": ratio * key_heads}
    sizes |= {"heads": shape.heads // shape.kv_heads if "kv" in name else heads, "kv_heads": 1}
    if "odd" in name:
        sizes |= {"hidden": shape.hidden // 2, "dense_width": 192}
    else:
        sizes |= {"hidden": 64, "moe_width": 64, "shared_width": 64, "dense_width": 64}
    return replace(shape, positions=8192, **sizes)


def compare(
    lily: ModuleType, folder: Path, lengths: tuple[int, ...], exact: bool, bound: Callable[[Any], float]
) -> None:
    """Logits after prompts of these lengths and after two more tokens, on both backends."""
    options = (EXACT, CPU_EXACT) if exact else ({}, {})
    with (
        lily.Engine.load(folder, backend="metal", **options[0]) as metal,
        lily.Engine.load(folder, backend="cpu", threads=1, **options[1]) as cpu,
    ):
        vocabulary = metal.info().vocabulary
        for length in lengths:
            ids = ids_of(vocabulary, length, seed=length).tolist()
            pairs = [[engine.prefill(ids) for engine in (metal, cpu)]]
            pairs += [[engine.decode_step(token) for engine in (metal, cpu)] for token in (3, 5)]
            for found, wanted in pairs:
                np.testing.assert_allclose(found, wanted, rtol=0, atol=bound(wanted), err_msg=str(length))


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_of_every_length(metal_lily: ModuleType, tiny: Tiny, name: str) -> None:
    folder = tiny(narrow(name), "mlx-4bit-g64", dtype="bfloat16")
    compare(metal_lily, folder, LENGTHS, True, lambda _: TOLERANCES["logits"])


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_as_shipped(metal_lily: ModuleType, tiny: Tiny, name: str) -> None:
    folder = tiny(all_chosen(narrow(name)), "mlx-4bit-g64", dtype="bfloat16")
    lengths = (1, 8, 9, 17, 64, 65, 257)
    compare(metal_lily, folder, lengths, False, lambda wanted: SHIPPED * float(np.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_five_thousand_tokens(metal_lily: ModuleType, tiny: Tiny, name: str) -> None:
    """Two whole blocks and a part of one, then steps that read a cache of 79 pages."""
    folder = tiny(narrow(name, heads=1), "mlx-4bit-g64", dtype="bfloat16")
    compare(metal_lily, folder, (5000,), True, lambda _: TOLERANCES["logits"])


def outcome(folder: Path, shape: Shape, ids: Any, chunk: int, **options: Any) -> tuple[Any, list[bytes]]:
    """Logits [tokens, vocab] of a prompt in chunks, and every number of the state behind it."""
    model = load(folder, chunk=chunk, **options)
    sequence = model.new_sequence()
    logits = model.forward(sequence, ids, all=True)
    attention = sum(map(shape.is_attention, range(shape.layers)))
    return logits, state_bytes(sequence, shape.layers - attention, attention)


OTHERWISE = {"exact": EXACT, "blocks": {"ablate": ("register_scan",)}}


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, {}, id=f"{name}-shipped") for name in SHAPES]
    + [
        pytest.param(name, options, id=f"{name}-{label}")
        for label, options in OTHERWISE.items()
        for name in ("moe", "gdn_ratio3", "family_heads")
    ],
)
def test_chunks_of_many_rows_give_the_same_bits(tiny: Tiny, name: str, options: dict[str, Any]) -> None:
    """No chunk has fewer than nine rows, so that the same kernels run; all logits and the state are equal."""
    shape = narrow(name, heads=1)
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(shape.vocab, 1000)
    whole, *others = (outcome(folder, shape, ids, chunk, **options) for chunk in reversed(CHUNKS))
    for other in others:
        np.testing.assert_array_equal(other[0], whole[0])
        assert other[1] == whole[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("moe", EXACT), ("gdn_ratio3", {}), ("family_heads", {})],
    ids=["moe-exact", "gdn_ratio3-shipped", "family_heads-shipped"],
)
def test_five_thousand_tokens_in_chunks(tiny: Tiny, name: str, options: dict[str, Any]) -> None:
    """256 and 4,096 leave a last chunk of many rows: the same bits.

    64 leaves one of eight rows, which have the kernels that don't round weights: the same keys and values
    before them, logits near those of the others.
    """
    shape = narrow(name, heads=1)
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(shape.vocab, 5000)
    found = []
    for chunk in CHUNKS:
        model = load(folder, chunk=chunk, **options)
        sequence = model.new_sequence()
        logits = model.forward(sequence, ids)
        found.append((logits, sequence.recurrent_state(0), *sequence.keys_values(0)))
    few, middle, whole = found
    for a, b in zip(middle, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    before = 5000 // 64 * 64
    for a, b in zip(few[2:], whole[2:], strict=True):
        assert a.shape[0] == 5000
        np.testing.assert_array_equal(a[:before], b[:before])
        assert not np.array_equal(a[before:], b[before:])
    limit = TOLERANCES["logits"] if options else SHIPPED * float(np.abs(whole[0]).max())
    np.testing.assert_allclose(few[0], whole[0], rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["moe", "gdn_ratio3", "family_heads"])
def test_a_chunk_of_few_rows_differs_by_rounding(tiny: Tiny, name: str) -> None:
    """A last chunk of one row has the kernels that don't round weights; rows before it have equal bits."""
    shape = all_chosen(narrow(name))
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    ids = ids_of(shape.vocab, 257)
    for options, bound in ((EXACT, TOLERANCES["logits"]), ({}, None)):
        few, whole = (outcome(folder, shape, ids, chunk, **options)[0] for chunk in (64, 4096))
        np.testing.assert_array_equal(few[:256], whole[:256])
        limit = bound or SHIPPED * float(np.abs(whole).max())
        np.testing.assert_allclose(few[256], whole[256], rtol=0, atol=limit)
        assert not np.array_equal(few[256], whole[256])


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_have_no_fault_and_no_schedule_shows(sim: Any, tiny: Tiny, name: str) -> None:
    """Under the checker: chunks of many rows, a last one of one row, a second prompt behind it, a step; three
    seeds.
    """
    sim.configure(checks=True)
    shape = narrow(name)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), chunk=32)
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        sequence = model.new_sequence()
        logits = [model.forward(sequence, ids_of(shape.vocab, length, seed=length)) for length in (65, 9, 1)]
        results.append((b"".join(each.tobytes() for each in logits), state_bytes(sequence, 1, 1)))
    assert sim.diagnostics() == []
    assert sim.counters()["bytes_loaded"] > 0  # counted by the checker alone
    assert results[0] == results[1] == results[2]
