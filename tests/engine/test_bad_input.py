"""What people give by mistake: refused with a message that names it; nothing is changed, lost or ignored."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import ids_of, load

import lily_py


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias: a token id must be a whole number"),
        ({"logits_processors": [lambda tokens, logits: "x"]}, "one returned str, expected numbers"),
        ({"logits_processors": [lambda tokens, logits: None]}, "one returned shape \\(\\), expected"),
        ({"logits_processors": [lambda tokens, logits: logits[:5]]}, "one returned shape \\(5,\\), expected"),
        ({"template_variables": {"messages": []}}, "template_variables can't hold 'messages'"),
        ({"template_variables": {"add_generation_prompt": False}}, "can't hold 'add_generation_prompt'"),
        ({"template_variables": {5: 5}}, "template_variables must be a mapping of names"),
        ({"regex": "\ud800"}, "regex: "),
        ({"grammar": "start: /\ud800/"}, "grammar: "),
        ({"grammar": "start: start", "thinking": False}, "^grammar: no answer follows it$"),
        (
            {"regex": "a{1000000}", "thinking": False},
            "^regex: lexer error: too many expressions constructed$",
        ),
    ],
)
def test_impossible_keywords_are_named(engine: lily_py.Engine, keywords: Any, message: str) -> None:
    before = engine.generate("Hello", max_tokens=4, seed=1).token_ids
    with pytest.raises(lily_py.InvalidArgumentError, match=message):
        engine.generate("Hello", **keywords)
    assert engine.generate("Hello", max_tokens=4, seed=1).token_ids == before


def test_a_schema_that_allows_anything_gives_json(engine: lily_py.Engine) -> None:
    any_schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}
    result = engine.generate("x", response_format=any_schema, thinking=False, max_tokens=200, seed=2)
    if result.finish_reason == "stop":
        json.loads(result.text)
    with pytest.raises(lily_py.InvalidArgumentError, match="response_format"):
        engine.generate("x", response_format={"type": "json_schema", "json_schema": {"schema": False}})


@pytest.mark.parametrize("path", [None, 5, "", b"bytes", "a\0b", [], object()])
def test_paths_that_are_none_are_named(folder: Path, engine: lily_py.Engine, path: Any) -> None:
    with engine.new_session() as session:
        session.append(ids_of(3))
        for call in (session.save, session.load, engine.load_session):
            with pytest.raises(lily_py.InvalidArgumentError, match="path must be a path, not empty"):
                call(path)
        assert len(session) == 3
    if path is not None:
        with pytest.raises(lily_py.InvalidArgumentError, match="cache_dir must be a path, not empty"):
            load(folder, cache_dir=path)


def test_a_home_folder_is_found(
    folder: Path, engine: lily_py.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    with engine.new_session() as session:
        session.append(ids_of(3))
        session.save("~/session")
        session.rewind(0)
        session.load("~/session")
        assert len(session) == 3
    load(folder, cache_dir="~/cache").close()
    assert sorted(path.name for path in home.iterdir()) == ["cache", "session"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_saving_replaces_files_only(engine: lily_py.Engine, tmp_path: Path) -> None:
    """A device, a pipe or a folder of that name stays what it is; behind a link, its file is replaced."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    with engine.new_session() as session:
        session.append(ids_of(3))
        for path in (pipe, tmp_path):
            with pytest.raises(lily_py.InvalidArgumentError, match="it isn't a file"):
                session.save(path)
        assert pipe.is_fifo()
        with pytest.raises(lily_py.InvalidArgumentError, match="can't be saved there"):
            session.save(tmp_path / ("x" * 300))
        session.save(link)
        assert link.is_symlink()
        with engine.load_session(target) as loaded:
            assert loaded.tokens == session.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_a_budget_without_its_folder_is_refused(folder: Path) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="cache_dir_bytes needs cache_dir"):
        load(folder, cache_dir_bytes="1GB")


def test_a_session_refuses_template_arguments_when_it_is_made(engine: lily_py.Engine) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="thinking must be True or False"):
        engine.new_session(thinking="yes")  # type: ignore[arg-type]


def test_what_runs_is_not_copied(engine: lily_py.Engine) -> None:
    """A copy would end the original's generation, or change its state, behind its back."""
    with engine.new_session() as session, engine.stream([1, 2], max_tokens=9, min_tokens=9) as stream:
        session.append([3])
        next(stream)
        for thing in (session, stream):
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(lily_py.InvalidArgumentError, match="can't be pickled or copied"):
                    attempt(thing)
        result = stream.finish()
        assert len(result.token_ids) == 9
        assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result


def test_helpers_ignore_nothing(engine: lily_py.Engine) -> None:
    with pytest.raises(lily_py.UnknownKeywordError, match="max_token"):
        engine.count_tokens("x", max_token=3)
    with pytest.raises(lily_py.InvalidArgumentError, match="tokens must be a list of token ids, got None"):
        engine.detokenize(None)  # type: ignore[arg-type]


def test_messages_belong_to_their_session(engine: lily_py.Engine) -> None:
    """What the caller does to its own afterwards changes no conversation."""
    mine = [{"role": "user", "content": "Hello"}]
    tools = [{"name": "look_up", "parameters": {"type": "object", "properties": {}}}]
    with engine.new_session(tools=tools) as session:
        session.append(mine)
        tokens = session.tokens
        mine[0]["content"] = "changed"
        tools[0]["name"] = "changed"
        session.messages[0]["content"] = "changed"  # type: ignore[index]
        assert session.messages == [{"role": "user", "content": "Hello"}]
        session.generate(max_tokens=2, logit_bias={256: -1e4})
        assert session.tokens[: len(tokens)] == tokens
        np.testing.assert_array_equal(session.logits(), engine.prefill(session.tokens))


def test_a_callback_that_raises_leaves_the_session_as_it_was(engine: lily_py.Engine) -> None:
    def broken(done: int, total: int) -> None:
        raise ZeroDivisionError

    with engine.new_session() as session:
        session.append(ids_of(20))
        with pytest.raises(ZeroDivisionError):
            session.append(ids_of(30, seed=1), progress=broken)
        assert session.tokens == ids_of(20)
        with pytest.raises(ZeroDivisionError):
            session.generate(ids_of(30, seed=1), progress=broken, max_tokens=3)
        np.testing.assert_array_equal(session.logits(), engine.prefill(session.tokens))
        assert session.generate([1], max_tokens=2, min_tokens=2).usage.completion_tokens == 2
