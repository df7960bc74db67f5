"""Chat templates, against `transformers`; B13, B14 and B15 of the field's reports."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import textfiles

from lily_py.errors import CheckpointError, TemplateError
from lily_py.text import ChatTemplate, ToolCall, ends_in_thinking

USER = {"role": "user", "content": "hi"}
TEXT = st.text(st.sampled_from("ab <>&'\"\né漢🦄"), max_size=8)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXT),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["work", "ping"]),
            "arguments": st.dictionaries(TEXT, JSON_VALUES, max_size=2),
        }
    ).map(lambda function: {"type": "function", "function": function}),
    min_size=1,
    max_size=2,
)
TURNS = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT}, optional={"reasoning_content": TEXT}
    ),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "tool_calls": CALLS}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT}),
)
SYSTEM = st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": TEXT}), max_size=1)
CONVERSATIONS = st.tuples(SYSTEM, st.lists(TURNS, max_size=4)).map(lambda parts: [*parts[0], USER, *parts[1]])


def _official(folder: Path, source: str, messages: list[Any], tools: list[Any] | None, **options: Any) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=CONVERSATIONS,
    use_tools=st.booleans(),
    thinking=st.sampled_from([None, True, False]),
    preserve=st.booleans(),
)
def test_prompts_are_those_of_transformers(
    tokenizer_folder: Path,
    template_source: str,
    template: ChatTemplate,
    tools: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    use_tools: bool,
    thinking: bool | None,
    preserve: bool,
) -> None:
    before = copy.deepcopy(messages)
    given_tools = tools if use_tools else None
    options = {} if thinking is None else {"enable_thinking": thinking}
    expected = _official(
        tokenizer_folder, template_source, messages, given_tools, preserve_thinking=preserve, **options
    )
    prompt = template.render(messages, tools=given_tools, thinking=thinking, preserve_thinking=preserve)
    assert prompt == expected
    assert messages == before, "the caller's messages are left alone"
    assert ends_in_thinking(prompt) is (thinking is not False)


ARGUMENTS = {"b": 1, "a": [1, "é"], "t": "<x>"}


def _with_arguments(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "work", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]


@pytest.mark.parametrize("text", [json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=2, ensure_ascii=False)])
def test_b13_arguments_as_json_text_are_an_object(template: ChatTemplate, text: str) -> None:
    prompt = template.render(_with_arguments(text))
    assert prompt == template.render(_with_arguments(ARGUMENTS))
    assert prompt.index("<parameter=b>") < prompt.index("<parameter=a>"), "in the caller's order"
    assert "<x>" in prompt


@pytest.mark.parametrize("nothing", ["", "{}", "  ", None, {}])
def test_b13_no_arguments_in_every_form(template: ChatTemplate, nothing: Any) -> None:
    prompt = template.render(_with_arguments(nothing))
    assert "<function=work>" in prompt
    assert "<parameter=" not in prompt.split("<function=work>")[1]


@pytest.mark.parametrize("text", ["{", "nonsense", '{"a": }', "[1]", "3", '"x"', "[" * 100_000])
def test_b13_invalid_arguments_name_the_message(template: ChatTemplate, text: str) -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\]: tool_calls\[0\]: arguments"):
        template.render(_with_arguments(text))


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "work", "arguments": {"count": 1}}},
        {"name": "work", "arguments": {"count": 1}},
        ToolCall("work", {"count": 1}),
    ],
    ids=["openai", "bare", "lily"],
)
def test_calls_are_taken_in_every_form(template: ChatTemplate, call: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = template.render([USER, message])
    assert "<function=work>\n<parameter=count>\n1\n</parameter>\n</function>" in prompt


@pytest.mark.parametrize("calls", ["work", {"name": "work"}, [None], [{}], [{"function": {"arguments": {}}}]])
def test_calls_that_are_none_name_the_message(template: ChatTemplate, calls: Any) -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\]: tool_calls"):
        template.render([USER, {"role": "assistant", "tool_calls": calls}])


def test_b14_a_developer_is_a_system(template: ChatTemplate) -> None:
    prompt = template.render([{"role": "developer", "content": "Be brief."}, USER])
    assert prompt == template.render([{"role": "system", "content": "Be brief."}, USER])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_b14_later_system_messages_are_merged_at_the_front(template: ChatTemplate) -> None:
    scattered = [{"role": "system", "content": "A"}, USER, {"role": "developer", "content": "B"}, USER]
    assert template.render(scattered) == template.render(
        [{"role": "system", "content": "A\n\nB"}, USER, USER]
    )


def test_b14_content_may_be_a_list_of_text_parts(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "input_text", "text": "B"}, {"text": "C"}, "D"]
    for role in ("system", "user"):
        messages = [{"role": role, "content": parts}, USER]
        assert template.render(messages) == template.render([{"role": role, "content": "ABCD"}, USER])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            r"content\[0\]: a part of type 'im",
        ),
        ({"role": "user", "content": [7]}, r"content\[0\]: a part of type 'int'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]: text must be a string"),
        ({"role": "user", "content": None}, "content must be a string"),
        ({"role": "user", "content": 5}, "content must be a string"),
        ({"role": "tool", "content": {"a": 1}}, "content must be a string"),
        ({"role": "user"}, "content must be a string"),
        ({"content": "x"}, "role must be a string"),
        ({"role": 3, "content": "x"}, "role must be a string"),
        ("hi", "must be an object"),
        (None, "must be an object"),
    ],
)
def test_messages_that_can_not_be_used_are_named(message: Any, complaint: str) -> None:
    with pytest.raises(TemplateError, match=rf"messages\[1\].*{complaint}"):
        ChatTemplate(textfiles.CHAT_TEMPLATE).render([USER, message])


@pytest.mark.parametrize("messages", [[], "hi", None, USER, 3])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(TemplateError, match=r"^messages"):
        ChatTemplate(textfiles.CHAT_TEMPLATE).render(messages)


def test_b15_the_templates_own_objections_are_passed_on(qwen_template: str) -> None:
    template = ChatTemplate(qwen_template)
    with pytest.raises(TemplateError, match=r"^No user query found in messages\.$"):
        template.render([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}])
    with pytest.raises(TemplateError, match=r"^Unexpected message role\.$") as error:
        template.render([USER, {"role": "critic", "content": "b"}])
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('only pairs') }}", "^only pairs$"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ [].append(1) }}", "unsafe|append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|__class__"),
        ("{{ cycle(cycle) }}", "cycle"),
    ],
)
def test_b15_failures_while_rendering_are_template_errors(source: str, complaint: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateError, match=complaint):
        template.render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% for x in y %}", "{% nonsense %}"])
def test_a_template_with_a_syntax_error_names_the_line(source: str) -> None:
    with pytest.raises(TemplateError, match=r"^chat template, line 2: "):
        ChatTemplate("first\n" + source)


def test_tojson_keeps_order_and_escapes_neither_html_nor_unicode() -> None:
    value = {"b": "<&>'", "a": "é🦄", "n": None, "l": [1, True]}
    prompt = ChatTemplate("{{ value | tojson }}").render([USER], value=value)
    assert prompt == '{"b": "<&>\'", "a": "é🦄", "n": null, "l": [1, true]}'


def test_loop_controls_blocks_and_dates_are_those_of_the_field() -> None:
    source = "{% for i in range(9) %}\n    {% if i == 1 %}{% continue %}{% endif %}\n{{ i }}\n"
    source += "    {% if i == 3 %}{% break %}{% endif %}\n{% endfor %}\n{{ strftime_now('%Y') }}"
    prompt = ChatTemplate(source).render([USER])
    year = datetime.datetime.now().year
    assert prompt.split() == ["0", "2", "3", str(year)]
    assert "    " not in prompt, "blanks before a block are dropped"


def test_bare_function_descriptions_are_wrapped(tools: list[dict[str, Any]]) -> None:
    template = ChatTemplate(textfiles.CHAT_TEMPLATE)
    bare = [tool["function"] for tool in tools]
    assert template.render([USER], tools=bare) == template.render([USER], tools=tools)


@pytest.mark.parametrize("tools", ["x", {"name": "x"}, [None], [{}], [{"function": {"name": 3}}], 5])
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(TemplateError, match=r"^tools"):
        ChatTemplate(textfiles.CHAT_TEMPLATE).render([USER], tools=tools)


def test_named_tokens_reach_the_template(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}")
    (tmp_path / "tokenizer_config.json").write_text((tokenizer_folder / "tokenizer_config.json").read_text())
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "<|im_end|><|endoftext|>"


def test_a_folder_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="UTF-8"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\nso far", True),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("plain", False),
        ("", False),
    ],
)
def test_whether_an_answer_begins_with_a_thought(prompt: str, inside: bool) -> None:
    assert ends_in_thinking(prompt) is inside
