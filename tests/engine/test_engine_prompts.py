"""What may be given to generate from, and what is refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import IDS, ids_of, load, scripted

import lily_py

USER = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Any:
    """An engine whose checkpoint has no chat template."""
    copied = tmp_path_factory.mktemp("base") / "checkpoint"
    copied.mkdir()
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (copied / path.name).symlink_to(path)
    with load(copied) as engine:
        yield engine


def answer(engine: lily_py.Engine, prompt: Any, **keywords: Any) -> lily_py.Result:
    return engine.generate(prompt, temperature=0, max_tokens=8, **keywords)


def test_text_is_one_user_message(engine: lily_py.Engine) -> None:
    assert answer(engine, USER[0]["content"]).token_ids == answer(engine, USER).token_ids
    assert answer(engine, USER).token_ids == engine.chat(USER, temperature=0, max_tokens=8).token_ids


def test_a_rendered_template_continues_as_raw_text_or_tokens(engine: lily_py.Engine) -> None:
    text = engine.apply_template(USER)
    assert "<|im_start|>user" in text
    expected = answer(engine, USER)
    assert answer(engine, text, raw=True).token_ids == expected.token_ids
    tokens = engine.tokenize(text, special_tokens=True)
    for ids in (tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.uint16)):
        assert answer(engine, ids).token_ids == expected.token_ids
    assert expected.usage.prompt_tokens == len(tokens) == engine.count_tokens(USER)


def test_raw_text_has_no_thought_and_no_calls(engine: lily_py.Engine) -> None:
    text = "<think>\n2\n</think>\n<tool_call>x</tool_call>"
    result = engine.generate("once", raw=True, logits_processors=scripted(engine, text))
    assert (result.text, result.reasoning, result.tool_calls) == (text, None, ())


def test_without_a_template_text_is_continued(base: lily_py.Engine) -> None:
    assert answer(base, "the cat").usage.prompt_tokens == len(base.tokenize("the cat"))
    with pytest.raises(lily_py.TemplateError, match="no chat template"):
        base.chat(USER)
    with pytest.raises(lily_py.InvalidArgumentError, match="thinking needs the chat template"):
        base.generate("the cat", thinking=True)


def test_template_arguments_reach_the_template(engine: lily_py.Engine) -> None:
    assert engine.apply_template(USER, thinking=False).endswith("<think>\n\n</think>\n\n")
    assert engine.apply_template(USER, thinking=True).endswith("<think>\n")
    assert engine.apply_template(USER, add_generation_prompt=False).endswith("<|im_end|>\n")
    tools = [{"name": "look", "parameters": {}}]
    assert '"name": "look"' in engine.apply_template(USER, tools=tools)
    counts = {engine.count_tokens(USER, thinking=thinking) for thinking in (True, False)}
    assert len(counts) == 2
    assert engine.count_tokens(USER, tools=tools) > engine.count_tokens(USER)


@pytest.mark.parametrize("keyword", ["tools", "thinking", "template_variables"])
def test_template_arguments_are_never_ignored(engine: lily_py.Engine, keyword: str) -> None:
    value: Any = {"tools": [{"name": "look"}], "thinking": True, "template_variables": {}}[keyword]
    for prompt, raw in ((ids_of(4), False), ("text", True)):
        with pytest.raises(lily_py.InvalidArgumentError, match=f"{keyword} needs the chat template"):
            engine.generate(prompt, raw=raw, **{keyword: value})


def test_b16_control_tokens_of_a_rendered_prompt_count_those_in_tokenize_do_not(
    engine: lily_py.Engine,
) -> None:
    assert IDS["<|im_end|>"] not in engine.tokenize("a <|im_end|> b")
    assert engine.detokenize(engine.tokenize("a <|im_end|> b")) == "a <|im_end|> b"
    assert IDS["<|im_end|>"] in engine.tokenize("a <|im_end|> b", special_tokens=True)


@pytest.mark.parametrize("prompt", ["", [], (), np.zeros(0, np.int64)])
def test_empty_prompts_are_refused(engine: lily_py.Engine, prompt: Any) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="empty"):
        engine.generate(prompt)
    if not isinstance(prompt, str):
        with pytest.raises(lily_py.InvalidArgumentError):
            engine.prefill(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"bytes", "got bytes"),
        ({"role": "user"}, "got dict"),
        ([1, 2.5], r"prompt\[1\] must be a whole number, got 2.5"),
        ([1, True], r"prompt\[1\] must be a whole number, got True"),
        ([1, "a"], r"prompt\[1\] must be a whole number, got 'a'"),
        ([1, None], r"prompt\[1\]"),
        ([1, 320], r"prompt\[1\] must be between 0 and 319, got 320"),
        ([-1], r"prompt\[0\] must be between 0 and 319, got -1"),
        ([1 << 70], r"prompt\[0\]"),
        (np.zeros((2, 2), np.int64), "one-dimensional"),
        (np.array([1.0, 2.0]), "integers"),
        ("lone \ud800 surrogate", "Unicode"),
    ],
)
def test_wrong_prompts_are_refused_by_name(engine: lily_py.Engine, prompt: Any, message: str) -> None:
    for call in (engine.generate, engine.stream, engine.count_tokens):
        with pytest.raises(lily_py.InvalidArgumentError, match=message):
            call(prompt)
    assert len(engine.generate([1], max_tokens=1).token_ids) == 1


@pytest.mark.parametrize("token", [-1, 320, 1.5, None, "a", True])
def test_wrong_tokens_of_decode_step_are_refused(engine: lily_py.Engine, token: Any) -> None:
    before = engine.prefill([1, 2, 3])
    with pytest.raises(lily_py.InvalidArgumentError, match="token must be"):
        engine.decode_step(token)
    after = engine.decode_step(4)
    np.testing.assert_array_equal(after, engine.prefill([1, 2, 3, 4]))
    np.testing.assert_array_equal(before, engine.prefill([1, 2, 3]))


def test_wrong_messages_are_refused_by_name(engine: lily_py.Engine) -> None:
    with pytest.raises(lily_py.TemplateError, match=r"messages\[1\]"):
        engine.chat([*USER, {"role": "user", "content": 7}])
    for wrong in ("text", [], {}, [1, 2], None):
        with pytest.raises(lily_py.InvalidArgumentError, match="messages must be a list"):
            engine.chat(wrong)  # type: ignore[call-overload]
    with pytest.raises(lily_py.InvalidArgumentError, match="raw=True is for text"):
        engine.generate(USER, raw=True)
    with pytest.raises(lily_py.InvalidArgumentError, match="thinking must be True or False, got 'yes'"):
        engine.generate(USER, thinking="yes")  # type: ignore[call-overload]
    with pytest.raises(lily_py.InvalidArgumentError, match="progress must be"):
        engine.generate(USER, progress=3)  # type: ignore[call-overload]


def test_prompt_beyond_the_context_is_refused_before_any_work(folder: Path) -> None:
    with load(folder, max_context=100) as engine:
        calls: list[int] = []

        def progress(done: int, _: int) -> None:
            calls.append(done)

        with pytest.raises(
            lily_py.ContextLengthError, match=r"150 tokens and the context 100.*shorten it by 51"
        ):
            engine.generate(ids_of(150), progress=progress)
        with pytest.raises(lily_py.ContextLengthError, match=r"max_context .*limit is 4096"):
            engine.generate(ids_of(100), progress=progress)
        with pytest.raises(
            lily_py.ContextLengthError, match=r"max_tokens is 60, together 110.*max_tokens to 50"
        ):
            engine.generate(ids_of(50), max_tokens=60, progress=progress)
        with pytest.raises(lily_py.ContextLengthError, match="101 tokens, the context is 100"):
            engine.prefill(ids_of(101))
        with engine.new_session() as session, pytest.raises(lily_py.ContextLengthError, match="rewind"):
            session.append(ids_of(101))
        assert calls == []
        engine.prefill(ids_of(100))
        with pytest.raises(lily_py.ContextLengthError):
            engine.decode_step(1)
        assert engine.generate(ids_of(99), max_tokens=1, temperature=0).usage.completion_tokens == 1
