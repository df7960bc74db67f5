"""B29: thoughts and tool calls taken out of an answer, the same however the stream is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily_py.text import (
    AnswerParser,
    ChatTemplate,
    ParsedAnswer,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    collect,
    parse_answer,
)

Tools = list[dict[str, Any]]

PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
WORK = "<tool_call>\n<function=work>\n<parameter=text>\nhello\n</parameter>\n</function>\n</tool_call>"


def _streamed(pieces: list[str], **options: Any) -> tuple[list[list[Any]], ParsedAnswer]:
    """Return (events of each piece, the joined answer)."""
    parser = AnswerParser(**options)
    events = [parser.feed(piece) for piece in pieces]
    events.append(parser.finish())
    return events, collect(parser, [event for batch in events for event in batch])


FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "<function=work>",
                "</function>",
                "<function=",
            ),
            *(
                "<parameter=text>",
                "<parameter=count>",
                "</parameter>",
                "\n",
                "\n\n",
                " ",
                "{",
                '{"name": "ping"}',
            ),
            *("5", "text", "<", ">", "</", "<tool", "_call>", "🦄", PING, WORK, f"\n{WORK}\n{PING}"),
        ]
    ),
    st.text(max_size=3),
)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    thinking=st.booleans(),
    use_tools=st.booleans(),
)
def test_every_cutting_of_the_stream_gives_the_same(
    tools: Tools, fragments: list[str], cuts: list[int], thinking: bool, use_tools: bool
) -> None:
    text = "".join(fragments)
    options = {"thinking": thinking, "tools": tools if use_tools else None}
    whole = parse_answer(text, **options)  # type: ignore[arg-type]
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert _streamed(pieces, **options)[1] == whole
    assert _streamed(list(text), **options)[1] == whole


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragments=st.lists(FRAGMENTS, max_size=14), thinking=st.booleans())
def test_nothing_but_tags_and_white_space_is_lost(tools: Tools, fragments: list[str], thinking: bool) -> None:
    text = "".join(fragments)
    answer = parse_answer(text, thinking=thinking, tools=tools)
    kept = answer.text + (answer.reasoning or "") + "".join(call.raw for call in answer.tool_calls)
    visible = "".join(kept.split()).replace("<think>", "").replace("</think>", "").replace("</tool_call>", "")
    original = (
        "".join(text.split()).replace("<think>", "").replace("</think>", "").replace("</tool_call>", "")
    )
    assert sorted(visible) == sorted(original)


class TestThoughts:
    """Reasoning apart from the answer."""

    def test_an_answer_that_begins_in_a_thought_is_split_at_its_end(self) -> None:
        answer = parse_answer("I see.\n\nSo.\n</think>\n\nYes.", thinking=True)
        assert (answer.reasoning, answer.text) == ("I see.\n\nSo.", "Yes.")

    def test_an_answer_without_thought_has_none(self) -> None:
        answer = parse_answer("Yes.\n")
        assert (answer.reasoning, answer.text) == (None, "Yes.\n")

    def test_an_empty_thought_is_empty_and_not_absent(self) -> None:
        answer = parse_answer("\n</think>\n\nYes.", thinking=True)
        assert (answer.reasoning, answer.text) == ("", "Yes.")

    @pytest.mark.parametrize("thinking", [True, False])
    def test_a_model_that_opens_the_thought_itself_is_understood(self, thinking: bool) -> None:
        answer = parse_answer("\n<think>\nHm.\n</think>\n\nYes.", thinking=thinking)
        assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")

    def test_a_thought_that_is_cut_off_leaves_the_answer_empty(self) -> None:
        events, answer = _streamed(["I was", " think", "ing </thi"], thinking=True)
        assert answer == ParsedAnswer(text="", reasoning="I was thinking </thi")
        assert all(isinstance(event, ReasoningDelta) for batch in events for event in batch)

    def test_the_tags_in_the_middle_of_a_text_are_text(self) -> None:
        text = "Models write <think> and </think>."
        assert parse_answer(text).text == text

    def test_deltas_come_as_early_as_they_can(self) -> None:
        events, _ = _streamed(["a", "b\n", "c</", "think>", "\n\n", "d", "e"], thinking=True)
        assert events == [
            [ReasoningDelta("a")],
            [ReasoningDelta("b")],
            [ReasoningDelta("\nc")],
            [],
            [],
            [TextDelta("d")],
            [TextDelta("e")],
            [],
        ]

    def test_call_syntax_inside_a_thought_is_no_call(self, tools: Tools) -> None:
        answer = parse_answer(f"Maybe {WORK}?\n</think>\n\nNo.", thinking=True, tools=tools)
        assert answer == ParsedAnswer(text="No.", reasoning=f"Maybe {WORK}?")

    def test_a_call_may_follow_the_thought_at_once(self, tools: Tools) -> None:
        answer = parse_answer(f"Now.\n</think>\n\n{PING}", thinking=True, tools=tools)
        assert answer == ParsedAnswer(text="", reasoning="Now.", tool_calls=[ToolCall("ping", {})])


class TestCalls:
    """Envelopes, whole, broken and several."""

    def test_text_before_a_call_is_kept_without_the_space_between(self, tools: Tools) -> None:
        answer = parse_answer(f"Let me look.\n\n{WORK}", tools=tools)
        assert answer == ParsedAnswer("Let me look.", tool_calls=[ToolCall("work", {"text": "hello"})])
        assert answer.tool_calls[0].raw.strip() == WORK

    def test_several_calls_in_a_row_are_several(self, tools: Tools) -> None:
        answer = parse_answer(f"{WORK}\n{PING}\n{WORK}\n", tools=tools)
        assert [call.name for call in answer.tool_calls] == ["work", "ping", "work"]
        assert answer.text == "", "no second call leaks as text"
        assert len({call.id for call in answer.tool_calls}) == 3

    def test_a_tag_split_over_pieces_never_shows(self, tools: Tools) -> None:
        pieces = ["Hi <to", "ol_", "call>\n<func", "tion=ping>\n</func", "tion>\n</tool_call>"]
        events, answer = _streamed(pieces, tools=tools)
        assert [event for batch in events for event in batch] == [TextDelta("Hi"), ToolCall("ping", {})]
        assert answer.text == "Hi"

    def test_a_tag_that_turns_out_to_be_none_shows_later(self, tools: Tools) -> None:
        events, answer = _streamed(["a <tool", "box>"], tools=tools)
        assert events[0] == [TextDelta("a")]
        assert answer.text == "a <toolbox>"

    def test_text_on_both_sides_of_a_call_does_not_run_together(self, tools: Tools) -> None:
        assert parse_answer(f"One.\n{PING}\nTwo.", tools=tools).text == "One.\n\nTwo."

    def test_white_space_after_the_last_call_is_dropped_and_elsewhere_kept(self, tools: Tools) -> None:
        assert parse_answer(f"{PING}\n ok. \n\n", tools=tools).text == "ok."
        assert parse_answer(" ok. \n\n", tools=tools).text == " ok. \n\n"

    @pytest.mark.parametrize("tail", ["", "\n", "\n</tool", "\n</tool_call"])
    def test_an_unclosed_envelope_around_a_whole_function_is_a_call(self, tools: Tools, tail: str) -> None:
        answer = parse_answer(WORK.removesuffix("\n</tool_call>") + tail, tools=tools)
        assert answer == ParsedAnswer("", tool_calls=[ToolCall("work", {"text": "hello"})])

    def test_an_unclosed_envelope_does_not_swallow_the_next_call(self, tools: Tools) -> None:
        answer = parse_answer(WORK.removesuffix("</tool_call>") + PING, tools=tools)
        assert [call.name for call in answer.tool_calls] == ["work", "ping"]

    def test_two_functions_in_one_envelope_are_two_calls(self, tools: Tools) -> None:
        text = "<tool_call>\n<function=ping>\n</function>\n<function=work>\n</function>\n</tool_call>"
        assert parse_answer(text, tools=tools).tool_calls == [ToolCall("ping", {}), ToolCall("work", {})]

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>\n<function=work>\n<parameter=text>\nhalf a val",
            "<tool_call>\n<function=work>\n<parameter=text>\nwhole\n</parameter>\n",
            "<tool_call>\n<function=wo",
            "<tool_call>\n",
            '<tool_call>\n{"name": "ping", "argu',
        ],
    )
    def test_what_is_cut_off_within_a_function_is_no_call_and_not_lost(self, tools: Tools, text: str) -> None:
        assert parse_answer(text, tools=tools) == ParsedAnswer(text=text)

    def test_prose_about_the_tag_is_text(self, tools: Tools) -> None:
        text = "Write <tool_call> before a call and </tool_call> after it."
        assert parse_answer(text, tools=tools) == ParsedAnswer(text=text)

    def test_a_forgotten_closing_tag_of_a_function_is_forgiven(self, tools: Tools) -> None:
        answer = parse_answer(WORK.replace("</function>\n", ""), tools=tools)
        assert answer.tool_calls == [ToolCall("work", {"text": "hello"})]

    def test_a_forgotten_closing_tag_of_a_value_is_forgiven(self, tools: Tools) -> None:
        function = "<function=work>\n<parameter=text>\na\n<parameter=count>\n5\n</function>"
        text = f"<tool_call>\n{function}\n</tool_call>\nok"
        answer = parse_answer(text, tools=tools)
        assert answer == ParsedAnswer("ok", tool_calls=[ToolCall("work", {"text": "a", "count": 5})])

    def test_an_object_in_the_envelope_is_a_call(self, tools: Tools) -> None:
        text = '<tool_call>\n{"name": "work", "arguments": {"count": 5}}\n</tool_call>'
        assert parse_answer(text, tools=tools).tool_calls == [ToolCall("work", {"count": 5})]

    def test_without_tools_call_syntax_is_text(self) -> None:
        assert parse_answer(WORK) == ParsedAnswer(text=WORK)

    def test_an_empty_list_of_tools_still_finds_calls(self) -> None:
        assert parse_answer(WORK, tools=[]).tool_calls == [ToolCall("work", {"text": "hello"})]


KEYS = {
    "text": st.text().filter(lambda text: "</parameter>" not in text and "\r" not in text),
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "items": st.lists(st.text(max_size=5), max_size=3),
    "options": st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.booleans(), max_size=3),
    "maybe": st.none() | st.integers(),
    "size": st.integers(),
}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.fixed_dictionaries({}, optional=KEYS))
def test_a_call_that_a_template_rendered_comes_back(
    tools: Tools, template: ChatTemplate, arguments: dict[str, Any]
) -> None:
    """The template, written by others, is the oracle: what it writes for a call is that call."""
    if any("</parameter>" in json.dumps(value) for value in arguments.values()):
        return
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "work", "arguments": arguments}]},
    ]
    prompt = template.render(messages, add_generation_prompt=False)
    written = prompt.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    answer = parse_answer(written, tools=tools)
    assert answer.tool_calls == [ToolCall("work", arguments)]
    assert answer.text == ""
