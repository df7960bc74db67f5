"""B10: text that streams token by token, never with half a character."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import textfiles

from lily_py.text import Detokenizer, Tokenizer

IDS = textfiles.token_ids()
SPECIAL = IDS["<|im_end|>"]


def _bytes_as_tokens(text: bytes) -> list[int]:
    """Return one token a byte; the tokenizer's first 256 tokens are the bytes in order."""
    return list(text)


def _stream(tokenizer: Tokenizer, tokens: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", ["🦄🏳️‍🌈", "漢字かな", "שלום", "naïve café", "a🦄 b", "𝔘𝔫𝔦"])
def test_b10_characters_appear_whole_when_their_last_byte_arrives(tokenizer: Tokenizer, text: str) -> None:
    pieces = _stream(tokenizer, _bytes_as_tokens(text.encode()))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(text)


def test_b10_a_leading_space_does_not_flush_half_a_character(tokenizer: Tokenizer) -> None:
    unicorn = "🦄".encode()
    pieces = _stream(tokenizer, [*unicorn[:2], *unicorn[2:], *b" the"])
    assert pieces[:4] == ["", "", "", "🦄"]
    broken = _stream(tokenizer, [*unicorn[:2], *b" x"])
    assert "".join(broken) == "\ufffd x", "bytes that are truly invalid are shown once, as soon as it is sure"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_b10_a_tail_cut_off_within_a_character_is_shown_once(tokenizer: Tokenizer, length: int) -> None:
    pieces = _stream(tokenizer, [*b"ok", *"🦄".encode()[:length]])
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == "ok\ufffd"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.one_of(st.integers(0, 400), st.sampled_from([0xF0, 0x9F, 0xA6, 0x84, 0xE6, SPECIAL]))),
    skip=st.booleans(),
)
def test_b10_pieces_joined_equal_the_whole_decoded(
    tokenizer: Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert "".join(_stream(tokenizer, tokens, skip)) == tokenizer.decode(tokens, skip_special=skip)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_b10_text_comes_back_without_replacement_characters(tokenizer: Tokenizer, text: str) -> None:
    pieces = _stream(tokenizer, _bytes_as_tokens(text.encode()))
    assert "".join(pieces) == text


def test_special_tokens_are_skipped_and_tags_are_kept(tokenizer: Tokenizer) -> None:
    tokens = [IDS["<think>"], *b"a", SPECIAL, IDS["</think>"]]
    assert "".join(_stream(tokenizer, tokens)) == "<think>a</think>"
    assert "".join(_stream(tokenizer, tokens, skip_special=False)) == "<think>a<|im_end|></think>"
