"""Forks, snapshots, prefixes and rewinding are exact; bf16 keys and values cost what bf16 costs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from native_support import FLOATS_ONLY, Ids, Tiny, fed, feed, ids_of, model_of, run, state_bytes
from oracles.result import Result
from oracles.shapes import SHAPES

from lily_py import _core
from lily_py.errors import InvalidArgumentError

ReferenceOf = Callable[[Path, Ids], Result]

NAME = "moe"
SHAPE = SHAPES[NAME]
ATTENTION = [SHAPE.is_attention(layer) for layer in range(SHAPE.layers)]


@pytest.fixture
def model(tiny: Tiny) -> _core.Model:
    return model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16")


def assert_same_future(model: _core.Model, first: _core.Sequence, second: _core.Sequence) -> None:
    """Equal states, and equal logits and states over the next tokens."""
    assert first.tokens == second.tokens
    assert state_bytes(first, ATTENTION) == state_bytes(second, ATTENTION)
    more = ids_of(SHAPE.vocab, 5, seed=77)
    np.testing.assert_array_equal(feed(model, first, more), feed(model, second, more))
    assert state_bytes(first, ATTENTION) == state_bytes(second, ATTENTION)


def test_stored_keys_and_values_are_the_fp32_ones_rounded_to_bf16(tiny: Tiny) -> None:
    """In the first attention layer, whose inputs no rounded key or value has reached yet."""
    path, ids = tiny(NAME, "mlx-4bit-g64"), ids_of(SHAPE.vocab, 70)
    single = run(model_of(path, kv_dtype="float32"), ids, ATTENTION)
    half = run(model_of(path, kv_dtype="bfloat16"), ids, ATTENTION)
    first = ATTENTION.index(True)
    for kind in ("keys", "values"):
        expected = getattr(single, kind)[first].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(getattr(half, kind)[first], expected)


@pytest.mark.parametrize("name", ["moe", "dense_untied", "interval2", "kv_ratio8", "head256"])
def test_bf16_keys_and_values_change_logits_by_their_rounding_only(
    tiny: Tiny, reference: ReferenceOf, name: str
) -> None:
    """Each stored number is off by at most 2^-9 of itself; attention averages, and is a part of the residual.

    So the logits stay within 2^-9 in the mean square (measured 3e-4 to 7e-4), and beyond fp32's 1e-6.
    """
    shape = SHAPES[name]
    attention = [shape.is_attention(layer) for layer in range(shape.layers)]
    path, ids = tiny(name, "mlx-4bit-g64"), ids_of(shape.vocab, 65)
    exact = reference(path, ids).logits
    half = run(model_of(path, kv_dtype="bfloat16", ablate=FLOATS_ONLY), ids, attention).logits
    error = np.sqrt(np.mean((half - exact) ** 2)) / np.sqrt(np.mean(exact**2))
    assert 1e-5 < error < 2**-9, f"relative error of the logits {error:.2e}"


def test_a_fork_has_the_same_future(model: _core.Model) -> None:
    for length in (1, 63, 64, 65, 130):
        original = fed(model, ids_of(SHAPE.vocab, length))
        assert_same_future(model, original.fork(), original)


def test_forks_do_not_write_into_each_other(model: _core.Model) -> None:
    """Pages of 64 tokens are shared until one side writes; 70 leaves a page half full."""
    prompt = ids_of(SHAPE.vocab, 70)
    original = fed(model, prompt)
    before = state_bytes(original, ATTENTION)
    futures = [ids_of(SHAPE.vocab, 90, seed=seed) for seed in (1, 2, 3)]
    forks = [original.fork() for _ in futures]
    for i in range(0, 90, 30):  # in turns, so that each writes while others share
        for fork, future in zip(forks, futures, strict=True):
            model.forward(fork, future[i : i + 30])
    assert state_bytes(original, ATTENTION) == before
    for fork, future in zip(forks, futures, strict=True):
        alone = fed(model, prompt)
        model.forward(alone, future)
        assert_same_future(model, fork, alone)
    assert_same_future(model, original, fed(model, prompt))


def test_an_original_written_after_a_fork_leaves_the_fork_alone(model: _core.Model) -> None:
    prompt = ids_of(SHAPE.vocab, 70)
    original = fed(model, prompt)
    fork = original.fork()
    model.forward(original, ids_of(SHAPE.vocab, 20, seed=4))
    del original
    assert_same_future(model, fork, fed(model, prompt))


@pytest.mark.parametrize("length", [1, 30, 63, 64, 65, 128])
def test_truncating_to_a_snapshot_is_as_if_nothing_had_followed(model: _core.Model, length: int) -> None:
    ids = ids_of(SHAPE.vocab, 200)
    sequence = fed(model, ids[:length])
    sequence.snapshot()
    model.forward(sequence, ids[length:])
    assert sequence.truncate(length + 1) == length
    assert_same_future(model, sequence, fed(model, ids[:length]))


def test_truncation_takes_the_nearest_snapshot_and_says_where_it_stands(model: _core.Model) -> None:
    ids = ids_of(SHAPE.vocab, 100)
    sequence = model.new_sequence()
    for start in (0, 20, 40, 60, 80):
        model.forward(sequence, ids[start : start + 20])
        sequence.snapshot()
    assert sequence.snapshots() == [0, 20, 40, 60, 80, 100]
    assert sequence.truncate(100) == 100
    assert sequence.truncate(79) == 60
    assert sequence.snapshots() == [0, 20, 40, 60]
    assert sequence.tokens == ids[:60].tolist()
    sequence.drop_snapshot(40)
    assert sequence.truncate(59) == 20
    assert sequence.truncate(5) == 0
    assert_same_future(model, sequence, model.new_sequence())


def test_a_rewound_fork_that_goes_another_way_leaves_its_origin_alone(model: _core.Model) -> None:
    ids = ids_of(SHAPE.vocab, 130)
    original = fed(model, ids[:70])
    original.snapshot()
    model.forward(original, ids[70:])
    fork = original.fork()
    fork.truncate(70)
    other = ids_of(SHAPE.vocab, 60, seed=5)
    model.forward(fork, other)
    expected = fed(model, ids[:70])
    model.forward(expected, other)
    assert_same_future(model, fork, expected)
    assert_same_future(model, original, fed(model, ids))


@pytest.mark.parametrize("length", [64, 70])
def test_sequences_that_continue_a_prefix_are_as_if_they_had_read_it(model: _core.Model, length: int) -> None:
    ids = ids_of(SHAPE.vocab, 130)
    source = fed(model, ids[:length])
    source.snapshot()
    prefix = source.prefix(length)
    assert prefix.tokens == ids[:length].tolist()
    model.forward(source, ids[length:])
    first, second = model.new_sequence(prefix), model.new_sequence(prefix)
    model.forward(first, ids_of(SHAPE.vocab, 80, seed=6))
    assert second.snapshots() == [0, length]
    assert_same_future(model, second, fed(model, ids[:length]))
    assert_same_future(model, source, fed(model, ids))
    del source, second
    first.truncate(length)
    assert_same_future(model, first, fed(model, ids[:length]))
    assert_same_future(model, model.new_sequence(prefix), fed(model, ids[:length]))


def test_a_prefix_needs_a_snapshot(model: _core.Model) -> None:
    with pytest.raises(InvalidArgumentError, match="30"):
        fed(model, ids_of(SHAPE.vocab, 30)).prefix(30)


def test_forks_share_memory_until_they_write(model: _core.Model) -> None:
    """Of 200 tokens, three full pages stay shared after each side has written its own last page."""
    original = fed(model, ids_of(SHAPE.vocab, 200))
    fork = original.fork()
    shared = len(set(original.blocks()) & set(fork.blocks()))
    assert shared == 4
    for sequence in (original, fork):
        model.forward(sequence, ids_of(SHAPE.vocab, 1))
    assert len(set(original.blocks()) & set(fork.blocks())) == 3


def test_state_sizes_are_what_the_shapes_say(model: _core.Model) -> None:
    recurrent_layers = ATTENTION.count(False)
    matrices = SHAPE.value_heads * SHAPE.gdn_dim**2
    inputs = (SHAPE.conv - 1) * SHAPE.conv_channels
    assert model.recurrent_bytes == 4 * recurrent_layers * (matrices + inputs)
    assert model.kv_bytes_per_token == 2 * 2 * ATTENTION.count(True) * SHAPE.kv_heads * SHAPE.head_dim


def test_cancelling_a_prefill_leaves_the_tokens_that_were_fed_and_it_can_go_on(tiny: Tiny) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=16)
    ids, token = ids_of(SHAPE.vocab, 100), _core.CancelToken()
    seen: list[tuple[int, int]] = []

    def watch(done: int, total: int) -> None:
        seen.append((done, total))
        if done >= 40:
            token.cancel()

    sequence = model.new_sequence()
    assert model.forward(sequence, ids, cancel=token, progress=watch) is None
    assert seen == [(16, 100), (32, 100), (48, 100)]
    assert sequence.tokens == ids[:48].tolist()
    rest = model.forward(sequence, ids[48:])
    whole = model.new_sequence()
    np.testing.assert_array_equal(rest, model.forward(whole, ids))
    assert_same_future(model, sequence, whole)


@pytest.mark.parametrize("fed_before", [0, 70])
def test_cancelling_inside_a_chunk_takes_the_whole_chunk_back(tiny: Tiny, fed_before: int) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=4096)
    ids = ids_of(SHAPE.vocab, 4000)
    sequence, untouched = (fed(model, ids[:fed_before]) if fed_before else model.new_sequence() for _ in "ab")
    chunks: list[int] = []
    token = _core.CancelToken()
    timer = threading.Timer(0.02, token.cancel)
    timer.start()
    assert model.forward(sequence, ids, cancel=token, progress=lambda done, _: chunks.append(done)) is None
    timer.join()
    assert chunks == []  # it did stop inside
    assert_same_future(model, sequence, untouched)


def test_ctrl_c_inside_a_chunk_takes_the_whole_chunk_back(tiny: Tiny) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=4096)
    ids = ids_of(SHAPE.vocab, 4000)
    sequence = fed(model, ids[:9])
    timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.forward(sequence, ids)
    timer.join()
    assert_same_future(model, sequence, fed(model, ids[:9]))


def test_an_exception_of_the_progress_callback_comes_out_and_the_sequence_stays_usable(tiny: Tiny) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=16)
    ids = ids_of(SHAPE.vocab, 40)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    sequence = model.new_sequence()
    with pytest.raises(KeyboardInterrupt):
        model.forward(sequence, ids, progress=fail)
    assert sequence.tokens == ids[:16].tolist()
    model.forward(sequence, ids[16:])
    assert_same_future(model, sequence, fed(model, ids))
