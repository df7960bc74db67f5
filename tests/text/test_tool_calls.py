"""Arguments in the types of their schema; where mlx-lm agrees with the reference it is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import qwen3_coder

from lily_py.text import parse_answer

Tools = list[dict[str, Any]]


def _call(arguments: dict[str, str], function: str = "work") -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={function}>\n{values}</function>"


def _argument(tools: Tools, key: str, written: str) -> Any:
    (call,) = parse_answer(f"<tool_call>\n{_call({key: written})}\n</tool_call>", tools=tools).tool_calls
    return call.arguments[key]


SAFE_TEXT = st.text().filter(lambda text: "<" not in text and text.lower() != "null")
WRITTEN = {
    "text": SAFE_TEXT,
    "unknown": SAFE_TEXT,
    "count": st.integers(-(10**15), 10**15).map(str),
    "ratio": st.one_of(
        st.integers(-999, 999).map(str), st.floats(-1e6, 1e6).map(lambda value: f"{value:.3f}")
    ),
    "flag": st.sampled_from(["true", "false", "True", "False"]),
    "items": st.sampled_from(["[]", '["a", 1]', "['a', None]", "[[1], {}]"]),
    "options": st.sampled_from(["{}", '{"a": [1, null]}', "{'a': True}"]),
}


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.fixed_dictionaries({}, optional=WRITTEN), function=st.sampled_from(["work", "other"]))
def test_calls_are_read_as_mlx_lm_reads_them(tools: Tools, arguments: dict[str, str], function: str) -> None:
    text = _call(arguments, function)
    expected = qwen3_coder.parse_tool_call(text, tools)
    (call,) = parse_answer(f"<tool_call>\n{text}\n</tool_call>", tools=tools).tool_calls
    assert {"name": call.name, "arguments": call.arguments} == expected


@pytest.mark.parametrize(
    "value",
    [
        *("", "\n", "a", " a ", "\n\na\n\n", "\ta\n ", "  indented\n    code\n", "a\r\n"),
        *("null", "5", "true", "[1]", "</function>", "</tool_call>", "<parameter=x>", "<tool_call>"),
    ],
)
def test_exactly_one_line_break_is_stripped_on_each_side_of_a_string(tools: Tools, value: str) -> None:
    assert _argument(tools, "text", value) == value


def test_a_value_on_the_tags_line_is_taken_as_it_is(tools: Tools) -> None:
    text = "<tool_call><function=work><parameter=text> a </parameter></function></tool_call>"
    assert parse_answer(text, tools=tools).tool_calls[0].arguments == {"text": " a "}


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("count", "5.0", 5),
        ("count", "-3", -3),
        ("count", " 7 ", 7),
        ("count", "1e3", 1000),
        ("count", "null", None),
        ("count", "None", None),
        ("ratio", "2.5", 2.5),
        ("ratio", "3", 3),
        ("ratio", "1e-3", 0.001),
        ("flag", "True", True),
        ("flag", "FALSE", False),
        ("items", "['a', None, True]", ["a", None, True]),
        ("items", "(1, 2)", [1, 2]),
        ("options", "{'a': 1}", {"a": 1}),
        ("options", '{"text": "line\nbreak"}', {"text": "line\nbreak"}),
        ("maybe", "null", None),
        ("maybe", "4", 4),
        ("note", "null", None),
        ("note", "5", "5"),
        ("colour", "red", "red"),
        ("size", "12", 12),
        ("anything", "5", "5"),
        ("anything", '{"a": 1}', {"a": 1}),
        ("unknown", "[1, 2]", "[1, 2]"),
        ("unknown", "null", "null"),
    ],
)
def test_values_take_the_type_of_the_schema(tools: Tools, key: str, written: str, expected: Any) -> None:
    value = _argument(tools, key, written)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("count", "five"),
        ("count", "5.5"),
        ("count", "9" * 5000),
        ("count", "1e999"),
        ("ratio", "nan"),
        ("ratio", "inf"),
        ("ratio", "1e999"),
        ("ratio", "0x10"),
        ("flag", "maybe"),
        ("items", "[1, 2"),
        ("items", "{}"),
        ("items", "(" * 5000),
        ("options", "[" * 50_000),
        ("options", "{1: }"),
        ("options", "{[]: 1}"),
    ],
)
def test_values_that_do_not_fit_stay_text_and_the_call_survives(tools: Tools, key: str, written: str) -> None:
    assert _argument(tools, key, written) == written


def test_a_schema_that_refers_to_itself_ends() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "integer"}]}
    parameters = {"properties": {"x": {"$ref": "#/$defs/Loop"}}, "$defs": {"Loop": loop}}
    tools = [{"type": "function", "function": {"name": "work", "parameters": parameters}}]
    assert _argument(tools, "x", "5") == 5


@pytest.mark.parametrize("parameters", [None, [], "x", {"properties": []}, {"properties": {"x": 5}}])
def test_broken_schemas_leave_text(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "work", "parameters": parameters}}]
    assert _argument(tools, "x", "5") == "5"
