"""Speculation changes how long an answer takes, nothing else: text, numbers, end and the state after it stay.

Drafts are forced: right ones are taken from the plain answer, wrong ones put where the test wants them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import (
    END,
    Keywords,
    Script,
    copy_with,
    ids_of,
    load,
    outcome,
    requests,
    spelled,
    together,
)

import lily_py
from lily_py.speculation import DraftDepth, Speculation

PLAIN: Keywords = {"draft_tokens": 0}


class FixedDepth(DraftDepth):
    """As many drafts as there are, whatever became of earlier ones."""

    def choose(self, match: int, most: int) -> int:
        return most


class Forced:
    """Drafts the known text; of each block the first few tokens, one more from block to block, are right."""

    def __init__(self, text: Sequence[int], always_right: bool = False) -> None:
        self.text = list(text)
        self.right = 1 << 30 if always_right else 0

    def draft(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        assert list(tokens) == self.text[: len(tokens)]
        drafts = self.text[len(tokens) : len(tokens) + count]
        right = self.right % (count + 1) if self.right < 1 << 30 else count
        self.right += self.right < 1 << 30
        drafts[right:] = [(token + 1) % 256 for token in drafts[right:]]
        return drafts, 0


@pytest.fixture(scope="module")
def quick(folder: Path) -> Iterator[lily_py.Engine]:
    """An engine that speculates, with snapshots so often that they fall into blocks of drafts."""
    with load(folder, speculation="prompt_lookup", snapshot_interval=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[lily_py.Engine]:
    """An engine without speculation that stores no states."""
    with load(folder, cache_bytes=0) as engine:
        yield engine


def forced(text: Sequence[int], always_right: bool = False) -> Callable[[int], Speculation]:
    """For `Runtime.speculate`: drafts are those of `Forced`, as many as `draft_tokens` allows."""
    return lambda most: Speculation(Forced(text, always_right), FixedDepth(), most)


@pytest.fixture
def force(quick: lily_py.Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`force(text)`: from now on, in this test, `quick` drafts as `forced` says."""
    quick._runtime.store.clear()
    return lambda *text: monkeypatch.setattr(quick._runtime, "speculate", forced(*text))


def assert_covers_its_tokens(session: lily_py.Session, cold: lily_py.Engine) -> None:
    """Logits from the session's state, and what it goes on to say, are those of its tokens alone."""
    tokens = session.tokens
    np.testing.assert_array_equal(session.logits(), cold.prefill(tokens))
    more = cold.generate(tokens, max_tokens=8, temperature=0)
    assert session.generate(max_tokens=8, temperature=0, **PLAIN).token_ids == more.token_ids


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 7, 10, 32])
def test_b27_greedy_text_is_the_plain_one(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None], depth: int
) -> None:
    """1,000 tokens over ends of pages, a snapshot every 16 tokens, drafts wrong at each place in turn."""
    prompt = ids_of(130, seed=depth)
    keywords: Keywords = {"max_tokens": 1000, "min_tokens": 1000, "temperature": 0}
    plain = cold.generate(prompt, **keywords)
    force([*prompt, *plain.token_ids])
    session = quick.new_session()
    result = session.generate(prompt, draft_tokens=depth, **keywords)
    assert outcome(result) == outcome(plain)
    usage = result.usage
    assert 0 < usage.accepted_tokens < usage.drafted_tokens
    assert usage.accepted_tokens > 1000 * (0.25 if depth == 1 else 0.4)
    assert session.tokens == [*prompt, *plain.token_ids]
    assert_covers_its_tokens(session, cold)
    session.rewind(700)
    assert_covers_its_tokens(session, cold)
    session.close()


@pytest.mark.parametrize("always_right", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_requests_of_every_kind_get_what_they_get_without(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None], seed: int, always_right: bool
) -> None:
    """Sampled, with stops, penalties, log probabilities (B20) and processors; streamed or not."""
    for prompt, keywords in requests(24, seed):
        keywords = keywords | {"max_tokens": 60, "xtc_probability": 0.3, "logit_bias": {5: 2.0}}
        plain = cold.generate(prompt, **keywords)
        force([*prompt, *plain.token_ids, *ids_of(40)], always_right)
        for result in (quick.generate(prompt, **keywords), quick.stream(prompt, **keywords).finish()):
            assert outcome(result) == outcome(plain)
            assert result.usage.accepted_tokens <= result.usage.drafted_tokens


def test_passes_are_saved(folder: Path, cold: lily_py.Engine) -> None:
    prompt = ids_of(20)
    keywords: Keywords = {"max_tokens": 100, "min_tokens": 100, "seed": 1}
    plain = cold.generate(prompt, **keywords)
    with load(folder, speculation="prompt_lookup", cache_bytes=0) as engine:
        engine._runtime.speculate = forced([*prompt, *plain.token_ids], always_right=True)
        before = engine._runtime.model.passes
        result = engine.generate(prompt, draft_tokens=8, **keywords)
        # The first token comes with the prompt, nine with each pass after it.
        assert engine._runtime.model.passes - before == 1 + 11
    assert outcome(result) == outcome(plain)
    assert result.usage.drafted_tokens == result.usage.accepted_tokens == 88


def test_b28_the_first_end_token_ends_the_answer_wherever_it_falls(
    folder: Path, tmp_path: Path, cold: lily_py.Engine
) -> None:
    """Each token of a plain answer is made the end token in turn; drafts go on beyond it."""
    prompt = ids_of(12)
    text = cold.generate(prompt, max_tokens=12, min_tokens=12, seed=3).token_ids
    for place in (0, 1, 2, 5, 11):
        end = text[place]
        ending = copy_with(
            folder,
            tmp_path / str(place),
            config={"eos_token_id": end},
            generation_config={"eos_token_id": end},
        )
        with load(ending, speculation="prompt_lookup") as engine:
            engine._runtime.speculate = forced([*prompt, *text, *ids_of(20)], always_right=True)
            session = engine.new_session()
            result = session.generate(prompt, max_tokens=40, seed=3, draft_tokens=9)
            assert result.finish_reason == "stop"
            assert result.token_ids == text[: text.index(end) + 1]
            assert session.tokens == [*prompt, *result.token_ids]
            np.testing.assert_array_equal(session.logits(), cold.prefill(session.tokens))


@pytest.mark.parametrize("stop", ["c", "de", "fgh", "i"])
def test_a_stop_string_inside_accepted_drafts_ends_the_answer_there(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None], stop: str
) -> None:
    prompt, text = ids_of(12), "abcdefghij"
    tokens = [*spelled(quick, text), END]

    def said(engine: lily_py.Engine, **keywords: Any) -> tuple[lily_py.Result, lily_py.Session]:
        session = engine.new_session()
        script = Script(tokens)
        result = session.generate(prompt, stop=stop, max_tokens=30, logits_processors=[script], **keywords)
        return result, session

    force([*prompt, *tokens, *ids_of(20)], True)
    result, session = said(quick, draft_tokens=9)
    plain, _ = said(cold)
    assert outcome(result) == outcome(plain)
    assert result.text == text[: text.index(stop)]
    assert result.usage.accepted_tokens > 0
    assert session.tokens == [*prompt, *result.token_ids]
    assert_covers_its_tokens(session, cold)


@pytest.mark.parametrize("way", ["cancel", "close", "drop", "processor", "interrupt"])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 10])
def test_b30_what_ends_an_answer_amid_drafts_leaves_exactly_its_tokens(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None], way: str, count: int
) -> None:
    prompt = ids_of(61)
    plain = cold.generate(prompt, max_tokens=30, min_tokens=30, seed=4)
    force([*prompt, *plain.token_ids], True)

    def disturb(tokens: list[int], logits: Any) -> Any:
        if len(tokens) == len(prompt) + count:
            if way == "processor":
                raise ZeroDivisionError
            signal.raise_signal(signal.SIGINT)
        return logits

    keywords: Keywords = {"max_tokens": 30, "min_tokens": 30, "seed": 4, "draft_tokens": 7}
    if way in ("processor", "interrupt"):
        keywords["logits_processors"] = [disturb]
    session = quick.new_session()
    stream: lily_py.Stream | None = session.stream(prompt, **keywords)
    assert stream is not None
    said = [next(stream).token_ids[0] for _ in range(count)]
    if way == "cancel":
        stream.cancel()
        assert next(stream).finish_reason == "cancelled"
    elif way == "close":
        stream.close()
    elif way == "drop":
        stream = None
    else:
        with pytest.raises(ZeroDivisionError if way == "processor" else KeyboardInterrupt):
            next(stream)
    assert said == list(plain.token_ids[:count])
    assert session.tokens == [*prompt, *said]
    assert_covers_its_tokens(session, cold)


def test_drafts_ahead_are_no_part_of_what_others_start_from(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None]
) -> None:
    """A second request takes the snapshots of one that is amid its drafts."""
    prompt = ids_of(61)
    keywords: Keywords = {"max_tokens": 60, "min_tokens": 60, "seed": 4}
    plain = cold.generate(prompt, **keywords)
    force([*prompt, *plain.token_ids], True)
    with quick.stream(prompt, draft_tokens=7, **keywords) as stream:
        for count in range(1, 40):
            next(stream)
            ids = [*prompt, *plain.token_ids[: count + 3]]
            more = quick.generate(ids, max_tokens=4, temperature=0, **PLAIN)
            assert more.token_ids == cold.generate(ids, max_tokens=4, temperature=0).token_ids
        assert stream.finish().token_ids == plain.token_ids


def test_structured_answers_are_the_plain_ones(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None]
) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'lily-py[grammar]'")
    prompt = ids_of(20)
    for seed in range(6):
        keywords: Keywords = {"regex": "([ab]{3}-){8}end", "max_tokens": 80, "seed": seed, "min_tokens": 2}
        plain = cold.generate(prompt, **keywords)
        assert plain.text.endswith("end")
        for always_right in (True, False):
            force([*prompt, *plain.token_ids, *ids_of(20)], always_right)
            result = quick.generate(prompt, **keywords)
            assert outcome(result) == outcome(plain)
            assert result.usage.accepted_tokens > 0


def test_requests_at_the_same_time_get_what_they_get_alone(
    quick: lily_py.Engine, cold: lily_py.Engine
) -> None:
    asked = [(prompt * 2, keywords | {"max_tokens": 80}) for prompt, keywords in requests(12, seed=6)]
    alone = [outcome(cold.generate(prompt, **keywords)) for prompt, keywords in asked]
    met = together([lambda p=p, k=k: outcome(quick.generate(p, **k)) for p, k in asked])
    assert met == alone


def test_drafts_wait_while_another_answer_is_made(
    quick: lily_py.Engine, cold: lily_py.Engine, force: Callable[..., None]
) -> None:
    prompt = ids_of(20)
    keywords: Keywords = {"max_tokens": 40, "min_tokens": 40, "seed": 5}
    plain = cold.generate(prompt, **keywords)
    force([*prompt, *plain.token_ids], True)
    with quick.stream(ids_of(9), **PLAIN) as other:
        next(other)
        result = quick.generate(prompt, **keywords)
        assert result.usage.drafted_tokens == 0
    assert result.token_ids == plain.token_ids
    assert quick.generate(prompt, **keywords).usage.drafted_tokens > 0


def test_choices_are_the_plain_ones(quick: lily_py.Engine, cold: lily_py.Engine) -> None:
    keywords: Keywords = {"n": 3, "max_tokens": 50, "seed": 2}
    choices = quick.generate(ids_of(30) * 2, **keywords).choices
    assert [outcome(each) for each in choices] == [
        outcome(each) for each in cold.generate(ids_of(30) * 2, **keywords).choices
    ]


def test_prompt_lookup_saves_passes_where_text_repeats(folder: Path, cold: lily_py.Engine) -> None:
    """Greedy text of a random model runs into a loop, which is then drafted."""
    prompt = ids_of(40) * 2
    keywords: Keywords = {"max_tokens": 800, "min_tokens": 800, "temperature": 0}
    plain = cold.generate(prompt, **keywords)
    with load(folder, speculation="prompt_lookup") as engine:
        before = engine._runtime.model.passes
        result = engine.generate(prompt, **keywords)
        passes = engine._runtime.model.passes - before
    assert outcome(result) == outcome(plain)
    assert result.usage.accepted_tokens > 300
    # Two for the prompt and its snapshot, one for each token that wasn't drafted.
    assert passes == 2 + 799 - result.usage.accepted_tokens


def test_the_demo_says_the_same(capsys: Any) -> None:
    questions = [
        "Count from 3 to 12.",
        "What is 12 plus 7?",
        "Spell lily.",
        "Repeat: one two one two one two",
    ]
    with (
        lily_py.Engine.load("demo", threads=1, speculation="prompt_lookup") as quick,
        lily_py.Engine.load("demo", threads=1) as plain,
    ):
        for question in questions:
            for keywords in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "top_logprobs": 2}):
                keywords = keywords | {"max_tokens": 200}
                assert outcome(quick.generate(question, **keywords)) == outcome(
                    plain.generate(question, **keywords)
                )


def test_any_thread_may_cancel(quick: lily_py.Engine, cold: lily_py.Engine) -> None:
    session = quick.new_session()
    stream = session.stream(ids_of(30) * 3, max_tokens=3000, min_tokens=3000, temperature=0)
    timer = threading.Timer(0.05, stream.cancel)
    timer.start()
    result = stream.finish()
    timer.join()
    assert result.finish_reason == "cancelled"
    assert session.tokens == [*ids_of(30) * 3, *result.token_ids]
    assert_covers_its_tokens(session, cold)


@pytest.mark.parametrize(
    ("value", "said"),
    [("eagle", "None or one of prompt_lookup, got 'eagle'"), (True, "got True"), (3, "got 3")],
)
def test_an_unknown_speculation_is_refused(folder: Path, value: Any, said: str) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match=f"speculation must be .*{said}"):
        load(folder, speculation=value)


@pytest.mark.parametrize("value", [-1, 33, 1.5, "7", True])
def test_impossible_draft_tokens_are_refused(quick: lily_py.Engine, value: Any) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="draft_tokens must be"):
        quick.generate(ids_of(3), draft_tokens=value)


def test_draft_tokens_need_an_engine_that_speculates(cold: lily_py.Engine) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="speculation='prompt_lookup'"):
        cold.generate(ids_of(3), draft_tokens=4)
    assert cold.generate(ids_of(3), max_tokens=2, draft_tokens=0).usage.drafted_tokens == 0


def test_names_of_peers_are_told_lilys(quick: lily_py.Engine) -> None:
    for name in ("num_speculative_tokens", "prompt_lookup_num_tokens", "num_pred_tokens"):
        with pytest.raises(lily_py.UnknownKeywordError, match="draft_tokens"):
            quick.generate(ids_of(3), **{name: 4})
