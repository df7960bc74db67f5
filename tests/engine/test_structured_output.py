"""Answers that follow a schema, an expression or a grammar, whatever the model would rather say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from engine_support import END, IDS, Tiny, ids_of, load, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily_py

guided = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs llguidance: pip install 'lily-py[grammar]'"
)
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}


@pytest.fixture(scope="module")
def chatty(tiny: Tiny) -> Iterator[lily_py.Engine]:
    """A random model: without a constraint, it says nothing that has a form."""
    with load(tiny("dense", "mlx-4bit-g64")) as engine:
        yield engine


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The meaning of the schemas that `schemas` draws."""
    if "enum" in schema:
        return value in schema["enum"] and type(value) in {type(each) for each in schema["enum"]}
    kind = schema["type"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        size = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return size and all(fits(item, schema["items"]) for item in value)
    properties = schema["properties"]
    known = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
    return known and all(fits(item, properties[name]) for name, item in value.items())


leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.lists(st.one_of(st.text(max_size=4), st.integers(0, 99)), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.tuples(st.integers(-50, 50), st.integers(0, 1000)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 1), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
        st.tuples(st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.booleans()).map(
            lambda t: {
                "type": "object",
                "properties": t[0],
                "required": sorted(t[0]) if t[1] else [],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


@guided
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 1 << 30))
def test_a_random_model_writes_what_the_schema_asks_for(
    chatty: lily_py.Engine, schema: dict[str, Any], seed: int
) -> None:
    result = chatty.generate(ids_of(5), response_format=as_format(schema), seed=seed, max_tokens=3000)
    assert result.finish_reason == "stop"
    assert fits(json.loads(result.text), schema)


@guided
def test_json_object_is_any_object(chatty: lily_py.Engine) -> None:
    for seed in range(30):
        result = chatty.generate(
            ids_of(3), response_format={"type": "json_object"}, seed=seed, max_tokens=400
        )
        assert result.text.startswith("{")
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)


@guided
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_expression_is_matched_whole(chatty: lily_py.Engine, temperature: float) -> None:
    for seed in range(5):
        result = chatty.generate(
            ids_of(4), regex=r"(yes|no), [0-9]{2,4}€", seed=seed, temperature=temperature, max_tokens=60
        )
        assert re.fullmatch(r"(yes|no), [0-9]{2,4}€", result.text)
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] in (END, IDS["<|endoftext|>"])


@guided
def test_a_grammar_is_followed(chatty: lily_py.Engine) -> None:
    grammar = 'start: "(" (start | item) ")"\nitem: "x" | "y"'
    result = chatty.generate(ids_of(4), grammar=grammar, seed=3, temperature=1.5, max_tokens=500)
    assert re.fullmatch(r"\(+[xy]\)+", result.text)
    assert result.text.count("(") == result.text.count(")")


@guided
def test_the_end_comes_exactly_where_the_answer_is_complete(chatty: lily_py.Engine) -> None:
    keen = {END: 50.0}
    assert chatty.generate([5], regex="[ab]{7}c*", logit_bias=keen, max_tokens=20).text.strip("ab") == ""
    assert len(chatty.generate([5], regex="[ab]{7}c*", logit_bias=keen, max_tokens=20).text) == 7
    reluctant = {END: -50.0, IDS["<|endoftext|>"]: -50.0}
    result = chatty.generate([5], regex="[ab]{7}c{0,2}", logit_bias=reluctant, max_tokens=20)
    assert result.text.endswith("cc")
    assert result.finish_reason == "stop"


@guided
def test_min_tokens_yields_to_an_answer_that_is_complete(chatty: lily_py.Engine) -> None:
    result = chatty.generate([5], regex="a{2,6}", min_tokens=5, logit_bias={END: 50.0}, max_tokens=20)
    assert len(result.text) >= 4
    assert chatty.generate([5], regex="ab", min_tokens=9, max_tokens=20).text == "ab"


@guided
def test_streams_stop_strings_and_sessions_follow_it_too(chatty: lily_py.Engine) -> None:
    keywords: dict[str, Any] = {"regex": "[0-9]{12}", "seed": 1, "max_tokens": 30}
    whole = chatty.generate(ids_of(6), **keywords)
    assert "".join(chunk.text for chunk in chatty.stream(ids_of(6), **keywords)) == whole.text
    stopped = chatty.generate(ids_of(6), stop=whole.text[5:8], **keywords)
    assert stopped.text == whole.text[: whole.text.index(whole.text[5:8])]
    with chatty.new_session() as session:
        session.append(ids_of(6))
        assert session.generate(**keywords).text == whole.text
    several = chatty.generate(ids_of(6), n=2, **keywords)
    assert [re.fullmatch("[0-9]{12}", each.text) is not None for each in several.choices] == [True, True]


@guided
def test_b29_the_constraint_begins_after_the_thought(chatty: lily_py.Engine) -> None:
    thought = scripted(chatty, "is {this} it?</think>", end=False)[0]

    def think(tokens: list[int], logits: Any) -> Any:
        return thought(tokens, logits) if thought.left else logits  # type: ignore[attr-defined]

    result = chatty.generate(
        "hello",
        thinking=True,
        response_format=FORMAT,
        logits_processors=[think],
        logit_bias={END: 20.0},
        max_tokens=60,
    )
    assert result.reasoning == "is {this} it?"
    assert result.text.strip() in ("true", "false")
    assert result.finish_reason == "stop"


@guided
def test_a_thought_cannot_end_the_answer(chatty: lily_py.Engine) -> None:
    result = chatty.generate(
        "hello", thinking=True, response_format=FORMAT, logit_bias={END: 90.0}, max_tokens=9
    )
    assert result.finish_reason == "length"
    assert (result.text, END in result.token_ids) == ("", False)


@guided
def test_no_thought_begins_within_an_answer_that_follows_something(chatty: lily_py.Engine) -> None:
    open_thought = chatty.tokenize("<think>", special_tokens=True)
    bias = dict.fromkeys(open_thought, 90.0)
    result = chatty.generate("hello", thinking=False, response_format=FORMAT, logit_bias=bias, max_tokens=60)
    assert isinstance(json.loads(result.text), bool)


@guided
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"regex": "a(b"}, "regex: .*unclosed group"),
        ({"regex": ""}, "regex must be a text, not empty, got ''"),
        ({"grammar": "start: nothing"}, "grammar: .*unknown name"),
        ({"grammar": 7}, "grammar must be a text, not empty, got 7"),
        ({"response_format": as_format({"type": "foo"})}, "response_format: Invalid type: foo"),
        ({"response_format": as_format({"$ref": "#/nope"})}, "response_format: .*does not exist"),
        ({"response_format": as_format({"enum": [object()]})}, "the schema must be JSON"),
        ({"response_format": {"type": "xml"}}, "response_format must be .* got"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format must be"),
        ({"response_format": "json"}, "response_format must be .*got 'json'"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar can't be combined"),
        ({"regex": "a", "tools": [{"name": "f", "parameters": {}}]}, "regex can't be combined with tools"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_is_computed(
    chatty: lily_py.Engine, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match=f"(?s){message}"):
        chatty.generate("hello", max_tokens=5, **keywords)
    with chatty.new_session() as session:
        with pytest.raises(lily_py.InvalidArgumentError, match=f"(?s){message}"):
            session.generate("hello", max_tokens=5, **keywords)
        assert session.tokens == []
        assert session.generate("hello", max_tokens=2).usage.completion_tokens > 0


def test_text_is_no_constraint(chatty: lily_py.Engine) -> None:
    free = chatty.generate(ids_of(4), seed=1, max_tokens=8)
    assert (
        chatty.generate(ids_of(4), seed=1, max_tokens=8, response_format={"type": "text"}).text == free.text
    )


def test_without_the_library_the_message_says_how_to_get_it(
    chatty: lily_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(lily_py.LilyError, match=r"pip install 'lily-py\[grammar\]'"):
        chatty.generate("hello", regex="a")


@guided
def test_the_demo_model_answers_in_the_form_asked_for() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["sum"], "additionalProperties": False}  # fmt: skip
    with lily_py.Engine.load("demo", threads=1) as engine:
        for thinking in (False, True):
            result = engine.generate(
                "What is 12 plus 7?",
                thinking=thinking,
                response_format=as_format(schema),
                seed=1,
                max_tokens=600,
            )
            if not thinking:
                assert result.finish_reason == "stop"
            if result.finish_reason == "stop":
                assert fits(json.loads(result.text), schema)


def test_examples_of_the_tests_own_meaning_of_schemas() -> None:
    inner = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    assert fits({"a": [True]}, schema)
    assert not any(fits(value, schema) for value in ({}, {"a": []}, {"a": [1]}, {"a": [True], "b": 1}, []))
    assert not fits(True, {"enum": [1]})
