"""`lily tokens`: ids and pieces, and back."""

from __future__ import annotations

import json

import pytest
from cli_support import Run

import lily_py

TEXTS = ["Spell lily.", "héllo, 世界 🌻", "<|im_end|>", "  two\n\nlines\t"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_count_are_those_of_the_library(run: Run, demo: lily_py.Engine, text: str) -> None:
    lines = run("tokens", "demo", text).out.splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == demo.tokenize(text)
    assert lines[-1] == f"{len(demo.tokenize(text))} tokens"


@pytest.mark.parametrize("text", TEXTS)
def test_ids_decode_to_the_text(run: Run, text: str) -> None:
    ids = json.loads(run("tokens", "demo", text, "--json").out)["ids"]
    for written in (" ".join(map(str, ids)), str(ids)):
        assert run("tokens", "demo", "--ids", written).out == text + "\n"


def test_pieces_are_shown_quoted_and_bytes_of_a_part_of_a_character(run: Run) -> None:
    out = run("tokens", "demo", "a é").out
    assert "'a'" in out
    assert r"b'\xc3'" in out


def test_control_tokens_count_only_when_asked_for(run: Run, demo: lily_py.Engine) -> None:
    plain = json.loads(run("tokens", "demo", "<|im_end|>", "--json").out)
    special = json.loads(run("tokens", "demo", "--special", "<|im_end|>", "--json").out)
    assert plain["count"] > 1
    assert special["ids"] == demo.tokenize("<|im_end|>", special_tokens=True)
    assert special["count"] == 1


def test_a_pipe_is_read_as_it_is(run: Run, demo: lily_py.Engine) -> None:
    text = "one\ntwo\n"
    assert json.loads(run("tokens", "demo", "--json", stdin=text).out)["ids"] == demo.tokenize(text)


@pytest.mark.parametrize(
    ("ids", "said"), [("1 x", "'x'"), ("-4", "'-4'"), ("1 99999", "99999"), ("1.5", "'1.5'")]
)
def test_what_is_no_id_is_named(run: Run, ids: str, said: str) -> None:
    ran = run("tokens", "demo", "--ids", "-", stdin=ids)
    assert (ran.status, ran.out) == (1, "")
    assert said in ran.err
