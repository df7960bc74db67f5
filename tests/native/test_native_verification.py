"""Drafts, verified several rows at a time, change no bit of text or state: B27, B28 on the native model."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from native_support import (
    ALL_SHAPES,
    INSTRUCTION_SETS,
    Ids,
    Tiny,
    fed,
    feed,
    ids_of,
    model_of,
    state_bytes,
)
from oracles.shapes import SHAPES
from sampling_support import chi_square, expected_distribution, sampler

from lily_py import _core
from lily_py.errors import InvalidArgumentError

NAME = "moe"
SHAPE = SHAPES[NAME]
ATTENTION = [SHAPE.is_attention(layer) for layer in range(SHAPE.layers)]


@pytest.fixture
def model(tiny: Tiny) -> _core.Model:
    return model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16")


def greedy() -> _core.Sampler:
    return sampler(temperature=0.0)


def wrong(token: int) -> int:
    return (token + 1) % SHAPE.vocab


def plain_text(model: _core.Model, prompt: Ids, length: int, draws: _core.Sampler) -> list[int]:
    """The prompt's last token and `length` tokens drawn one by one after it."""
    sequence = fed(model, prompt[:-1])
    text = [int(prompt[-1])]
    for _ in range(length):
        text.append(model.step(sequence, text[-1], draws))
    return text


def assert_same_future(model: _core.Model, sequence: _core.Sequence, attention: Sequence[bool]) -> None:
    """The state is that of its tokens, computed from nothing; and so are the next ones."""
    expected = fed(model, sequence.tokens)
    assert state_bytes(sequence, attention) == state_bytes(expected, attention)
    more = ids_of(SHAPE.vocab, 5, seed=77)
    np.testing.assert_array_equal(feed(model, sequence, more), feed(model, expected, more))
    assert state_bytes(sequence, attention) == state_bytes(expected, attention)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", ["moe", "dense_untied", "family_heads", "gdn_dim48", "conv2"])
def test_rows_of_drafts_are_those_of_single_steps(tiny: Tiny, name: str, isa: str) -> None:
    """Logits of each row, and the state after each number of accepted ones, by every table of kernels."""
    shape = ALL_SHAPES[name]
    attention = [shape.is_attention(layer) for layer in range(shape.layers)]
    model = model_of(tiny(shape, "mlx-4bit-g64"), kv_dtype="bfloat16", ablate=INSTRUCTION_SETS[isa])
    if not model.backend.startswith(f"cpu ({isa},"):
        pytest.skip(f"this machine has no {isa}")
    ids = ids_of(shape.vocab, 75)
    single = fed(model, ids[:60])
    logits, states = [], []
    for token in ids[60:]:
        logits.append(model.forward(single, np.array([token], np.int32)))
        states.append(state_bytes(single, attention))
    for depth in (1, 2, 7, 14):
        for accepted in range(depth + 1):
            sequence = fed(model, ids[:60])
            drafts = ids[61 : 61 + depth].tolist()
            for row in range(accepted + 1):
                found = model.step_logits(sequence, int(ids[60 + row]), drafts if row == 0 else [])
                np.testing.assert_array_equal(found, logits[row])
            assert sequence.tokens == ids[: 61 + accepted].tolist()
            assert state_bytes(sequence, attention) == states[accepted]


@pytest.mark.parametrize("depth", [*range(1, 9), 15, 31, 63])
def test_b27_greedy_text_is_the_plain_one_whatever_was_drafted(tiny: Tiny, depth: int) -> None:
    """1,000 tokens; drafts go wrong at each place of a block in turn, or nowhere; snapshots in between."""
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=64)
    prompt = ids_of(SHAPE.vocab, 61)
    plain = plain_text(model, prompt, 1000 + 2 * depth, greedy())
    sequence, text, block = fed(model, prompt[:-1]), plain[:1], 0
    passes = model.passes
    while len(text) <= 1000:
        at, right = len(text), block % (depth + 1)
        drafts = plain[at : at + depth]
        drafts[right:] = [wrong(token) for token in drafts[right:]]
        for row in range(right + 1):
            text.append(model.step(sequence, text[-1], greedy(), drafts if row == 0 else []))
        if block % 5 == 0:
            sequence.snapshot()
        block += 1
    assert text == plain[: len(text)]
    assert model.passes - passes == block  # accepted drafts cost no pass of their own
    assert_same_future(model, sequence, ATTENTION)
    kept = sequence.snapshots()[-2]
    assert sequence.truncate(kept) == kept
    assert_same_future(model, sequence, ATTENTION)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 12},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("drafts", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_b28_sampled_tokens_follow_the_targets_distribution(
    model: _core.Model, options: dict[str, Any], drafts: str
) -> None:
    """The draft is the most probable token, one that can't be drawn, or each token in turn.

    What is drawn after it, accepted or not, is counted over 4,000 seeds and compared with the formulas.
    """
    prompt = ids_of(SHAPE.vocab, 20, seed=3)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    logits = feed(model, model.new_sequence(), prompt)[-1] * np.float32(4)  # a few likely tokens
    bias = [(token, float(3 * logits[token] / 4)) for token in range(SHAPE.vocab)]
    expected = expected_distribution(logits, **full)
    likely = max(expected, key=lambda token: expected[token])
    never = min(set(range(SHAPE.vocab)) - set(expected), default=int(logits.argmin()))
    start = fed(model, prompt[:-1])
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for seed in range(4000):
        sequence, draws = start.fork(), sampler(seed=seed, logit_bias=bias, **options)
        draft = {"right": likely, "wrong": never, "mixed": seed % SHAPE.vocab}[drafts]
        token = model.step(sequence, int(prompt[-1]), draws, [draft, likely])
        first[token] += 1
        if token == likely:
            second[model.step(sequence, token, draws)] += 1
    assert_follows(first, expected)
    after = feed(model, start.fork(), np.array([prompt[-1], likely], np.int32))[-1]
    for token, value in bias:
        after[token] += np.float32(value)
    assert_follows(second, expected_distribution(after, **full))


def assert_follows(counts: Counter[int], expected: dict[int, float]) -> None:
    """Tokens that are expected fewer than ten times are counted as one."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    common = [token for token in expected if expected[token] * total >= 10]
    seen = [counts[token] for token in common]
    chances = [expected[token] for token in common]
    if total - sum(seen) or 1 - sum(chances) > 1e-9:
        seen.append(total - sum(seen))
        chances.append(1 - sum(chances))
    if len(seen) > 1:
        assert chi_square(np.array(seen), np.array(chances)) < 4.5


@pytest.mark.parametrize(
    "options",
    [
        *SAMPLINGS,
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"xtc_probability": 0.5, "xtc_threshold": 0.005},
    ],
    ids=str,
)
def test_sampled_text_of_a_seed_is_the_plain_one(model: _core.Model, options: dict[str, Any]) -> None:
    """The same seed, penalties and log probabilities included: each draw sees what was accepted before it."""
    prompt = ids_of(SHAPE.vocab, 30, seed=4)

    def make() -> _core.Sampler:
        draws = sampler(seed=5, **options)
        draws.keep_log_probabilities(True)
        draws.observe(prompt)
        return draws

    draws, sequence = make(), fed(model, prompt[:-1])
    plain, chances = [int(prompt[-1])], []
    for _ in range(200):
        plain.append(model.step(sequence, plain[-1], draws))
        chances.append((draws.log_probability(plain[-1]), draws.best(3)))
    draws, sequence, text = make(), fed(model, prompt[:-1]), plain[:1]
    ahead = 0
    for i in range(190):
        drafts = plain[i + 1 : i + 8] if ahead == 0 else []
        if drafts:
            ahead = i % 7 + 1
            drafts[ahead - 1] = wrong(drafts[ahead - 1])
        text.append(model.step(sequence, text[-1], draws, drafts))
        assert (draws.log_probability(text[-1]), draws.best(3)) == chances[i]
        ahead -= 1
    assert text == plain[:191]


USES: dict[str, Callable[[_core.Model, _core.Sequence], object]] = {
    "snapshot": lambda _, sequence: sequence.snapshot(),
    "fork": lambda _, sequence: sequence.fork(),
    "another token": lambda model, sequence: model.step(sequence, 7, greedy()),
    "other drafts": lambda model, sequence: model.step(sequence, 7, greedy(), [8, 9]),
    "a prompt": lambda model, sequence: model.forward(sequence, ids_of(SHAPE.vocab, 9)),
    "a shared step": lambda model, sequence: model.forward_each([sequence], np.array([3], np.int32)),
    "a trace": lambda model, sequence: model.trace(sequence, 3),
    "truncation": lambda _, sequence: sequence.truncate(40),
    "leaving": lambda model, sequence: model.leave(sequence),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_whatever_else_is_done_with_a_sequence_takes_drafts_back(
    model: _core.Model, accepted: int, use: str
) -> None:
    """Over the end of a page of 64 tokens; accepted rows stay."""
    ids = ids_of(SHAPE.vocab, 70)
    sequence = fed(model, ids[:40])
    sequence.snapshot()
    model.forward(sequence, ids[40:61])
    model.join(sequence)
    for row in range(accepted + 1):
        model.step(sequence, int(ids[61 + row]), greedy(), ids[62:67].tolist() if row == 0 else [])
    assert sequence.tokens == ids[: 62 + accepted].tolist()
    USES[use](model, sequence)
    assert_same_future(model, sequence, ATTENTION)
    model.leave(sequence)


def test_a_fork_of_a_sequence_with_drafts_ahead_goes_its_own_way(model: _core.Model) -> None:
    ids = ids_of(SHAPE.vocab, 70)
    sequence = fed(model, ids[:60])
    model.step(sequence, int(ids[60]), greedy(), ids[61:66].tolist())
    model.step(sequence, int(ids[61]), greedy())
    fork = sequence.fork()
    model.forward(fork, ids_of(SHAPE.vocab, 10, seed=9))
    model.forward(sequence, ids[62:])
    assert_same_future(model, fork, ATTENTION)
    assert_same_future(model, sequence, ATTENTION)


def test_a_sequence_or_a_model_may_go_while_drafts_are_ahead(tiny: Tiny) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16")
    ids = ids_of(SHAPE.vocab, 70)
    gone, left = fed(model, ids[:60]), fed(model, ids[:60])
    for sequence in (gone, left):
        model.step(sequence, int(ids[60]), greedy(), ids[61:66].tolist())
    del gone, sequence
    expected = fed(model, ids[:61])
    del model
    assert state_bytes(left, ATTENTION) == state_bytes(expected, ATTENTION)


def test_impossible_drafts_are_refused_and_nothing_is_fed(tiny: Tiny) -> None:
    model = model_of(tiny(NAME, "mlx-4bit-g64"), kv_dtype="bfloat16", chunk=16)
    sequence = fed(model, ids_of(SHAPE.vocab, 10))
    for drafts, words in (
        ([SHAPE.vocab], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * 16, "at most 15 drafts"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            model.step(sequence, 1, greedy(), drafts)
    assert sequence.length == 10
    model.step(sequence, 1, greedy(), [1] * 15)
    assert_same_future(model, sequence, ATTENTION)


def test_drafts_of_one_and_steps_and_prompts_of_others_in_the_same_passes(model: _core.Model) -> None:
    """Each gets what it gets alone, with or without drafts, whoever computes it."""
    prompts = [ids_of(SHAPE.vocab, 20 + i, seed=i) for i in range(4)]
    alone = [plain_text(model, prompt, 200, sampler(seed=i)) for i, prompt in enumerate(prompts)]
    long = ids_of(SHAPE.vocab, 1500, seed=9)
    expected = model.forward(model.new_sequence(), long)
    texts: list[list[int]] = [[] for _ in prompts]
    start = threading.Barrier(5)
    read: list[Any] = []

    def decode(number: int) -> None:
        sequence, draws = fed(model, prompts[number][:-1]), sampler(seed=number)
        text, plain, depth = [int(prompts[number][-1])], alone[number], 2 * number
        model.join(sequence)
        start.wait()
        while len(text) <= 190:
            drafts = plain[len(text) : len(text) + depth]
            if len(text) % 3 == 0 and drafts:
                drafts[-1] = wrong(drafts[-1])
            text.append(model.step(sequence, text[-1], draws, drafts))
        model.leave(sequence)
        assert state_bytes(sequence, ATTENTION) == state_bytes(fed(model, sequence.tokens), ATTENTION)
        texts[number] = text

    def prefill() -> None:
        start.wait()
        read.append(model.forward(model.new_sequence(), long))

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    threads.append(threading.Thread(target=prefill))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [text[:180] for text in texts] == [text[:180] for text in alone]
    np.testing.assert_array_equal(read[0], expected)
