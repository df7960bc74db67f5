"""B19: an answer ends before its first stop string, of which nothing is ever shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily_py.errors import InvalidArgumentError
from lily_py.text import StopStrings


def _run(pieces: list[str], stops: Any) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = [watcher.feed(piece) for piece in pieces]
    return [*shown, watcher.finish()], watcher.matched


def _expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Go character by character: the first that completes a stop string ends the text, the longest counts."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


CHARACTERS = st.sampled_from("ab<🦄 ")
STOPS = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(st.text(CHARACTERS, max_size=5), max_size=8), stops=STOPS)
def test_b19_every_cutting_of_the_stream_gives_the_same(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected = _expected(text, stops)
    for cutting in (pieces, [text], list(text)):
        shown, matched = _run(cutting, stops)
        assert ("".join(shown), matched) == expected
        for i in range(len(shown)):
            assert expected[0].startswith("".join(shown[:i])), "nothing shown is ever taken back"


def test_b19_a_stop_string_spread_over_tokens() -> None:
    shown, matched = _run(["the br", "own", " f", "ox", "!"], ["own fox"])
    assert shown == ["the br", "", "", "", "", ""]
    assert matched == "own fox"


def test_b19_of_a_stop_and_its_prefix_the_one_that_is_complete_first_counts() -> None:
    assert _run(["xabc"], ["abc", "ab"]) == (["x", ""], "ab")
    assert _run(["x", "a", "b", "c"], ["abc", "ab"]) == (["x", "", "", "", ""], "ab")


def test_b19_a_held_back_beginning_is_shown_when_it_turns_out_to_be_none() -> None:
    shown, matched = _run(["a own", "er"], ["own fox"])
    assert (shown, matched) == (["a ", "owner", ""], None)
    shown, matched = _run(["the own fo"], ["own fox"])
    assert (shown, matched) == (["the ", "own fo"], None)


def test_b19_more_than_four_stop_strings_are_fine() -> None:
    assert _run(["one two seven"], ["three", "four", "five", "six", "seven"])[0] == ["one two ", ""]


def test_one_string_is_one_stop_and_none_is_none() -> None:
    assert _run(["abc"], "bc") == (["a", ""], "bc")
    assert _run(["abc"], None) == (["abc", ""], None)
    assert _run(["abc"], []) == (["abc", ""], None)


@pytest.mark.parametrize("stops", ["", ["a", ""], [None], 3, {"a": 1}, [b"x"]])
def test_b19_impossible_stops_are_refused(stops: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^stop"):
        StopStrings(stops)
