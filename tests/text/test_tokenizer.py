"""Tokens of a text and back, against the `tokenizers` library; B11, B12 and B16 of the field's reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import textfiles

from lily_py.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from lily_py.text import Tokenizer

IDS = textfiles.token_ids()
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            [*IDS, "the ", " a", "\n\n", "🦄", "עברית", "漢字", "e\u0301", "\u212a", "<|im_", "end|>"]
        ),
    ),
    max_size=6,
).map("".join)
property_test = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def official(tokenizer_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@property_test
@given(text=TEXTS)
def test_rendered_prompts_are_encoded_as_the_library_does(
    tokenizer: Tokenizer, official: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text, special_tokens=True) == official.encode(text, add_special_tokens=False).ids


@property_test
@given(text=TEXTS)
def test_b16_control_tokens_typed_by_a_user_are_ordinary_characters(
    tokenizer: Tokenizer, official: tokenizers.Tokenizer, text: str
) -> None:
    tokens = tokenizer.encode(text)
    assert not set(tokens) & set(IDS.values())
    assert tokenizer.decode(tokens) == official.normalizer.normalize_str(text)
    if not any(control in official.normalizer.normalize_str(text) for control in IDS):
        assert tokens == official.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("control", sorted(IDS))
def test_b16_control_tokens_of_a_template_are_recognised(tokenizer: Tokenizer, control: str) -> None:
    assert tokenizer.encode(f"a{control}b", special_tokens=True)[1] == IDS[control]
    assert IDS[control] not in tokenizer.encode(f"a{control}b")


def test_b16_control_tokens_that_appear_by_normalisation_are_ordinary_too(tokenizer_folder: Path) -> None:
    description = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    token = len(textfiles.vocabulary()) + len(IDS)
    added = {**description["added_tokens"][0], "id": token, "content": "<K>", "normalized": True}
    description["added_tokens"].append(added)
    tokenizer = Tokenizer(json.dumps(description))
    kelvin = "<\N{KELVIN SIGN}>"
    assert token in tokenizer.encode(kelvin, special_tokens=True), "NFC makes it a K"
    assert token not in tokenizer.encode(kelvin)


@property_test
@given(tokens=st.lists(st.integers(0, 400), max_size=12), skip=st.booleans())
def test_b11_decoding_agrees_with_the_library_also_beyond_the_vocabulary(
    tokenizer: Tokenizer, official: tokenizers.Tokenizer, tokens: list[int], skip: bool
) -> None:
    assert tokenizer.decode(tokens, skip_special=skip) == official.decode(tokens, skip_special_tokens=skip)


def test_b11_ids_beyond_the_tokenizer_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(textfiles.vocabulary()) + len(IDS)
    for token in (tokenizer.vocab_size, 248_319, 1 << 40):
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.decode([104, token, 105]) == tokenizer.decode([104, 105])


def test_flags_of_the_tokenizer_decide_what_is_skipped(tokenizer: Tokenizer) -> None:
    for control, special in textfiles.ADDED_TOKENS.items():
        assert tokenizer.is_special(IDS[control]) is special
        assert tokenizer.decode([IDS[control]]) == ("" if special else control)
        assert tokenizer.decode([IDS[control]], skip_special=False) == control
        assert tokenizer.token_id(control) == IDS[control]


def test_added_tokens_may_have_characters_outside_the_byte_alphabet(tokenizer_folder: Path) -> None:
    description = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    added = {
        **description["added_tokens"][0],
        "id": len(textfiles.vocabulary()) + len(IDS),
        "content": "<a b→>",
    }
    description["added_tokens"].append(added)
    text = json.dumps(description)
    tokens = Tokenizer(text).encode("x<a b→>", special_tokens=True)
    assert Tokenizer(text).decode(tokens, skip_special=False) == "x<a b→>"


def test_b12_the_tokenizers_own_end_token_joins_the_others(tokenizer_folder: Path) -> None:
    end = Tokenizer.from_folder(tokenizer_folder, [IDS["<|endoftext|>"]])
    assert end.eos_token_ids == (IDS["<|endoftext|>"], IDS["<|im_end|>"])
    again = Tokenizer.from_folder(tokenizer_folder, [IDS["<|im_end|>"], 5, 5])
    assert again.eos_token_ids == (IDS["<|im_end|>"], 5)


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        ("<|im_end|>", (IDS["<|im_end|>"],)),
        ({"content": "<|endoftext|>", "special": True}, (IDS["<|endoftext|>"],)),
        (None, ()),
        ("not in the vocabulary", ()),
    ],
)
def test_b12_the_end_token_is_read_in_every_form(tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    textfiles.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


def test_numpy_ids_are_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.array([71, 72], np.int32)) == tokenizer.decode([71, 72])  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 1.0, "a", None, True])
def test_what_is_no_id_is_refused(tokenizer: Tokenizer, token: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="token must be an integer"):
        tokenizer.decode([token])


@pytest.mark.parametrize("text", [None, b"bytes", 3, ["a"], "\ud800"])
@pytest.mark.parametrize("special", [False, True])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: Any, special: bool) -> None:
    with pytest.raises(InvalidArgumentError):
        tokenizer.encode(text, special_tokens=special)


def test_a_missing_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"version": "1.0", "model": {"type": "X"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_another_kind_of_decoder_is_refused(tokenizer_folder: Path) -> None:
    description = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    description["decoder"] = None
    with pytest.raises(UnsupportedModelError, match="byte-level"):
        Tokenizer(json.dumps(description))
