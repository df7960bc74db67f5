"""The same bits whatever company a row keeps: chunks, threads, instruction sets, batches, boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_support import ALL_SHAPES, INSTRUCTION_SETS, Ids, Tiny, feed, ids_of, model_of, state_bytes
from oracles.shapes import SHAPES, Shape

Logits = Any

CASES = [
    ("moe", "mlx-4bit-g64"),
    ("moe", "mlx-mixed"),
    ("gdn_ratio3", "mlx-3bit-g32"),
    ("odd", "mlx-8bit-g64"),
    ("interval2", "mlx"),
    ("family_heads", "mlx-4bit-g128"),
    ("top6", "mlx-nvfp4"),
    ("kv_ratio6", "mlx-mxfp8"),
    ("thin", "mlx-4bit-g32"),
    ("ragged", "mlx"),
]


def attention_of(name: str) -> list[bool]:
    return [ALL_SHAPES[name].is_attention(layer) for layer in range(ALL_SHAPES[name].layers)]


def outcome(
    path: Path, ids: Ids, attention: Sequence[bool], **options: Any
) -> tuple[Logits, dict[str, bytes]]:
    """Logits after every token and the state, with the engine's own settings (bf16 keys and values)."""
    model = model_of(path, **({"kv_dtype": "bfloat16"} | options))
    sequence = model.new_sequence()
    logits = feed(model, sequence, ids)
    return logits, state_bytes(sequence, attention)


def assert_same(
    first: tuple[Logits, dict[str, bytes]], second: tuple[Logits, dict[str, bytes]], what: str
) -> None:
    np.testing.assert_array_equal(first[0], second[0], err_msg=what)
    assert [name for name, data in first[1].items() if data != second[1][name]] == [], what


@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_every_chunk_size_gives_the_same_bits(tiny: Tiny, name: str, fmt: str) -> None:
    path, ids, attention = (
        tiny(ALL_SHAPES[name], fmt),
        ids_of(ALL_SHAPES[name].vocab, 100),
        attention_of(name),
    )
    whole = outcome(path, ids, attention, chunk=4096)
    for chunk in (1, 2, 3, 4, 5, 7, 8, 9, 17, 64, 2048):
        assert_same(whole, outcome(path, ids, attention, chunk=chunk), f"chunk {chunk}")


@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_every_number_of_threads_gives_the_same_bits(tiny: Tiny, name: str, fmt: str) -> None:
    path, ids, attention = tiny(ALL_SHAPES[name], fmt), ids_of(ALL_SHAPES[name].vocab, 70), attention_of(name)
    alone = outcome(path, ids, attention, threads=1)
    few = outcome(path, ids[:20], attention, threads=1)
    for threads in (2, 4):
        assert_same(alone, outcome(path, ids, attention, threads=threads), f"{threads} threads")
        together = outcome(path, ids[:20], attention, threads=threads, chunk=1)
        assert_same(few, together, f"{threads} threads, token by token")


@pytest.mark.parametrize("ablate", [(), ("integer_dot",)])
@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_every_instruction_set_gives_the_same_bits(
    tiny: Tiny, name: str, fmt: str, ablate: tuple[str, ...]
) -> None:
    path, ids, attention = tiny(ALL_SHAPES[name], fmt), ids_of(ALL_SHAPES[name].vocab, 70), attention_of(name)
    plain = {
        chunk: outcome(path, ids, attention, chunk=chunk, ablate=(*ablate, *INSTRUCTION_SETS["generic"]))
        for chunk in (64, 3)
    }
    for isa in ("avx2", "avxvnni", "avx512vnni"):
        without = (*ablate, *INSTRUCTION_SETS[isa])
        if not model_of(path, ablate=without, threads=1).backend.startswith(f"cpu ({isa},"):
            pytest.skip(f"this machine has no {isa}")
        for chunk, expected in plain.items():
            assert_same(expected, outcome(path, ids, attention, chunk=chunk, ablate=without), isa)


# One row more or less than every boundary at which a kernel changes its way: attention pages of 64 and spans
# of 1024 positions, gates of the delta rule in blocks of 256 rows, 8 rows for a product and for attention.
LENGTHS = [63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]


@pytest.fixture(scope="module")
def one_by_one(tiny: Tiny) -> tuple[Path, Ids, Logits, dict[int, dict[str, bytes]]]:
    """A long prompt fed token by token: every row's logits, and the states three tokens after each length."""
    path, ids = tiny("interval2", "mlx-4bit-g64"), ids_of(SHAPES["interval2"].vocab, 1028)
    model = model_of(path, kv_dtype="bfloat16", chunk=1)
    sequence = model.new_sequence()
    logits, states, done = [], {}, 0
    for length in LENGTHS:
        logits.append(feed(model, sequence, ids[done : length + 3]))
        states[length] = state_bytes(sequence.fork(), attention_of("interval2"))
        done = length + 3
    return path, ids, np.concatenate(logits), states


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_then_decoding_is_the_same_as_decoding_all_of_it(
    one_by_one: tuple[Path, Ids, Logits, dict[int, dict[str, bytes]]], length: int
) -> None:
    path, ids, expected, states = one_by_one
    model = model_of(path, kv_dtype="bfloat16", chunk=2048)
    sequence = model.new_sequence()
    prompt = feed(model, sequence, ids[:length])
    decoded = [feed(model, sequence, ids[i : i + 1]) for i in range(length, length + 3)]
    np.testing.assert_array_equal(np.concatenate([prompt, *decoded]), expected[: length + 3])
    assert state_bytes(sequence, attention_of("interval2")) == states[length]


@pytest.mark.parametrize("length", [1023, 1024, 1025, 2049])
def test_attention_shared_out_by_spans_of_keys_gives_the_same_bits(tiny: Tiny, length: int) -> None:
    """Spans of 1,024 keys, one more or less than whole ones; few rows are split by spans, many are not."""
    path, ids = tiny("interval2", "mlx-4bit-g64"), ids_of(SHAPES["interval2"].vocab, length + 12)
    outcomes = []
    for threads, ablate in ((1, ("attention_spans",)), (1, ()), (2, ()), (5, ())):
        model = model_of(path, kv_dtype="bfloat16", threads=threads, ablate=ablate)
        sequence = model.new_sequence()
        model.forward(sequence, ids[:length])
        few = [feed(model, sequence, ids[length + i : length + i + 1]) for i in range(3)]
        few.append(feed(model, sequence, ids[length + 3 :]))
        outcomes.append((np.concatenate(few), state_bytes(sequence, attention_of("interval2"))))
    for other in outcomes[1:]:
        assert_same(outcomes[0], other, "spans")


SWITCHES = [
    "byte_dot",
    "expanded_panels",
    "expert_groups",
    "attention_vectors",
    "attention_spans",
    "prefetch",
]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["moe", "thin"])
def test_switching_an_optimisation_off_changes_no_bit(tiny: Tiny, name: str, switch: str) -> None:
    path, ids, attention = tiny(ALL_SHAPES[name], "mlx-4bit-g64"), ids_of(200, 40), attention_of(name)
    expected = outcome(path, ids, attention, chunk=40)
    for chunk in (1, 40):
        assert_same(expected, outcome(path, ids, attention, chunk=chunk, threads=2, ablate=(switch,)), switch)


def test_a_busy_pool_of_sleeping_threads_finishes_every_step(tiny: Tiny) -> None:
    """More threads than cores, none of which spins: each region has to wake them."""
    path = tiny("moe", "mlx-4bit-g64")
    ids = ids_of(SHAPES["moe"].vocab, 30)
    expected = outcome(path, ids, attention_of("moe"), chunk=1, threads=1)
    assert_same(expected, outcome(path, ids, attention_of("moe"), chunk=1, threads=9, ablate=("spin",)), "9")


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 9, 12, 16])
def test_any_number_of_query_heads_to_a_kv_head_gives_the_same_bits_in_any_chunk(
    tiny: Tiny, heads: int
) -> None:
    shape: Shape = replace(SHAPES["dense"], layers=2, interval=2, heads=heads, kv_heads=1)
    path, ids = tiny(shape, "mlx-4bit-g64"), ids_of(shape.vocab, 70)
    whole = outcome(path, ids, [False, True], chunk=128)
    for chunk in (1, 6):
        assert_same(whole, outcome(path, ids, [False, True], chunk=chunk), f"chunk {chunk}")


@pytest.mark.parametrize(("name", "fmt"), CASES)
def test_sequences_decoded_together_get_the_bits_they_get_alone(tiny: Tiny, name: str, fmt: str) -> None:
    path, attention = tiny(ALL_SHAPES[name], fmt), attention_of(name)
    model = model_of(path, kv_dtype="bfloat16")
    prompts = [
        ids_of(ALL_SHAPES[name].vocab, length, seed=length) for length in (1, 3, 40, 63, 64, 65, 7, 20, 90, 2)
    ]
    alone, together = [], []
    for prompt in prompts:
        for group in (alone, together):
            group.append(model.new_sequence())
            model.forward(group[-1], prompt)
    tokens = ids_of(ALL_SHAPES[name].vocab, 3 * len(prompts), seed=9).reshape(3, -1)
    for step in range(3):
        expected = [feed(model, s, tokens[step, i : i + 1])[0] for i, s in enumerate(alone)]
        np.testing.assert_array_equal(model.forward_each(together, tokens[step]), np.stack(expected))
    for first, second in zip(alone, together, strict=True):
        assert first.tokens == second.tokens
        assert state_bytes(first, attention) == state_bytes(second, attention)


def test_a_pair_and_a_quartet_of_sequences_agree_with_one(tiny: Tiny) -> None:
    """The row counts at which a product takes another form: 1, 2 to 3, 4 to 8, more."""
    path = tiny("moe", "mlx-4bit-g64")
    model = model_of(path, kv_dtype="bfloat16")
    prompt = ids_of(SHAPES["moe"].vocab, 30)
    base = model.new_sequence()
    model.forward(base, prompt)
    expected = feed(model, base.fork(), prompt[:1])[0]
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
        forks = [base.fork() for _ in range(count)]
        logits = model.forward_each(forks, np.full(count, prompt[0], np.int32))
        np.testing.assert_array_equal(logits, np.tile(expected, (count, 1)))


def test_only_the_last_logits_are_the_same_as_all_of_them(tiny: Tiny) -> None:
    path, ids = tiny("moe", "mlx-4bit-g64"), ids_of(SHAPES["moe"].vocab, 50)
    model = model_of(path, kv_dtype="bfloat16", chunk=16)
    last = model.forward(model.new_sequence(), ids)
    np.testing.assert_array_equal(last, feed(model, model.new_sequence(), ids)[-1])


@pytest.mark.parametrize("name", ["moe", "odd", "family_heads", "thin"])
@pytest.mark.parametrize("fmt", ["mlx-4bit-g64", "mlx-4bit-g128", "mlx-4bit-g32"])
def test_one_and_two_rows_by_bytes_equal_the_route_of_more_rows(tiny: Tiny, name: str, fmt: str) -> None:
    path, ids, attention = tiny(ALL_SHAPES[name], fmt), ids_of(ALL_SHAPES[name].vocab, 12), attention_of(name)
    expected = outcome(path, ids, attention, chunk=12, ablate=("byte_dot",))
    for chunk in (1, 2, 3, 12):
        assert_same(expected, outcome(path, ids, attention, chunk=chunk), f"{chunk} rows")
