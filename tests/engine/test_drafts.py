"""What is drafted: the lookup against a plain search, and a depth that pays for itself or goes to zero."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily_py.speculation import DraftDepth, PromptLookup, Speculation
from lily_py.speculation.depth import ROW_COST


def searched(tokens: list[int], count: int) -> tuple[list[int], int]:
    """The definition, place by place: the longest match of 2 to 8 tokens, the last one among equals."""
    for length in range(min(8, len(tokens) - 1), 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                while len(text) < len(tokens) + count:
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :], length
    return [], 0


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    pieces=st.lists(st.integers(1, 60), max_size=4),
    count=st.integers(1, 20),
)
def test_drafts_are_those_of_a_plain_search(tokens: list[int], pieces: list[int], count: int) -> None:
    lookup = PromptLookup()
    for size in sorted({min(piece, len(tokens)) for piece in [*pieces, len(tokens)]}):
        assert lookup.draft(tokens[:size], count) == searched(tokens[:size], count)


def test_the_lookup_grows_with_its_conversation() -> None:
    text = [random.Random(1).randrange(50) for _ in range(5000)]
    lookup = PromptLookup()
    for size in (1, 1000, 1024, 1025, 4999, 5000):
        assert lookup.draft(text[:size], 5) == searched(text[:size], 5)


def seconds(right: Callable[[int], bool], length: int, matches: Callable[[int], int]) -> tuple[float, int]:
    """Time of an answer in passes of one row, and its tokens; draft `i` of the text is right(i)."""
    depth, at, time = DraftDepth(), 0, 0.0
    while at < length:
        kind = matches(at)
        drafts = depth.choose(kind, 10)
        accepted = 0
        while accepted < drafts and right(at + accepted):
            accepted += 1
        if drafts:
            depth.observe(kind, drafts, accepted)
        time += 1 + ROW_COST * drafts
        at += 1 + accepted
    return time, at


@pytest.mark.parametrize("kinds", [1, 4, 7])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(kinds: int) -> None:
    """Whatever their matches, which come in any order."""
    rng = random.Random(kinds)
    time, tokens = seconds(lambda _: False, 2000, lambda _: 2 + rng.randrange(kinds))
    assert time < 1.03 * tokens


def test_drafts_that_are_always_right_are_made_in_full() -> None:
    time, tokens = seconds(lambda _: True, 2000, lambda _: 8)
    assert tokens / time > 0.98 * 11 / (1 + 10 * ROW_COST)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_no_chance_makes_an_answer_slower(chance: float) -> None:
    rng = random.Random(7)
    luck = [rng.random() < chance for _ in range(6000)]
    time, tokens = seconds(lambda i: luck[i], 5000, lambda _: 3)
    assert time < 1.03 * tokens
    if chance >= 0.7:
        assert time < 0.85 * tokens


def test_text_that_begins_to_repeat_is_drafted_soon() -> None:
    time, _ = seconds(lambda i: i >= 1000, 1400, lambda _: 4)
    assert time < 1.03 * 1000 + 400 / 1.5


def test_an_answer_follows_its_drafts() -> None:
    class Fixed:
        def draft(self, tokens: list[int], count: int) -> tuple[list[int], int]:
            return [1, 2, 3][:count], 5

    speculation = Speculation(Fixed(), DraftDepth(), 3)  # type: ignore[arg-type]
    first = speculation.drafts([0], 9)
    assert first == [1, 2, 3][: len(first)]
    assert len(first) == 2  # worth it by the chance that is expected of drafts
    speculation.drawn(1)
    assert speculation.drafts([0, 1], 8) == []  # computed already
    speculation.drawn(7)
    assert (speculation.drafted, speculation.accepted) == (2, 1)
    assert speculation.drafts([0, 1, 7], 1) in ([], [1])
    speculation = Speculation(Fixed(), DraftDepth(), 3)  # type: ignore[arg-type]
    assert speculation.drafts([0], 0) == []
