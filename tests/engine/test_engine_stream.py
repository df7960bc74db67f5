"""Streams: chunks, stop strings, thought and calls in them; cancelling from anywhere; Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from engine_support import END, ids_of, scripted

import lily_py

NO_END: dict[str, Any] = {"logit_bias": {END: -1e4, END - 2: -1e4}, "max_tokens": 3000}
TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    }
]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def test_chunks_join_to_the_result(engine: lily_py.Engine) -> None:
    text = "naïve 日本語 👩‍👩‍👧 שלום end"
    with engine.stream(ids_of(5), logits_processors=scripted(engine, text)) as stream:
        chunks = list(stream)
    result = stream.result
    assert "".join(chunk.text for chunk in chunks) == "".join(map(str, chunks)) == result.text == text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("�" not in chunk.text for chunk in chunks)
    assert len(chunks) == len(result.token_ids)


def test_b10_an_end_within_a_character_shows_it_once_as_invalid(engine: lily_py.Engine) -> None:
    processors = scripted(engine, "ok 👍")
    with engine.stream(ids_of(5), logits_processors=processors, max_tokens=5) as stream:
        chunks = [chunk.text for chunk in stream]
    assert "".join(chunks) == "ok �"
    assert chunks[:-1] == ["o", "k", " ", ""]


def test_stream_and_generate_agree(engine: lily_py.Engine) -> None:
    keywords: dict[str, Any] = {"seed": 11, "max_tokens": 60, "temperature": 1.2}
    streamed = engine.stream("hello", **keywords).finish()
    whole = engine.generate("hello", **keywords)
    assert (streamed.text, streamed.token_ids, streamed.reasoning) == (
        whole.text,
        whole.token_ids,
        whole.reasoning,
    )
    assert isinstance(engine.generate("hello", stream=True, **keywords), lily_py.Stream)
    assert isinstance(engine.chat([{"role": "user", "content": "hello"}], stream=True), lily_py.Stream)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("the quick brown fox jumps", ["own fox"], "the quick br"),
        ("the quick brown fox jumps", "own fox", "the quick br"),
        ("the quick brown fox", ["brown cow", "brown fax"], "the quick brown fox"),
        ("aaab", ["aab"], "a"),
        ("one two three", ["two", "two three"], "one "),
        ("one two three", ["three", "wo", "e t"], "on"),
        ("cost 5€ or 6", ["€"], "cost 5"),
        ("日本語", ["本"], "日"),
        ("👩‍👧 family", ["👧"], "👩‍"),
        ("a b c d e f", ["x", "y", "z", "q", "w", "f", "u"], "a b c d e "),
        ("ends on the stop", ["stop"], "ends on the "),
        ("held to the en", ["end"], "held to the en"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_b19_nothing_of_a_stop_string_is_ever_shown(
    engine: lily_py.Engine, text: str, stop: Any, shown: str, chat: bool
) -> None:
    prompt: Any = [{"role": "user", "content": "x"}] if chat else ids_of(5)
    keywords = {"thinking": False} if chat else {}
    with engine.stream(prompt, stop=stop, logits_processors=scripted(engine, text), **keywords) as stream:
        pieces = [chunk.text for chunk in stream]
    assert "".join(pieces) == stream.result.text == shown
    for count in range(len(pieces)):
        assert shown.startswith("".join(pieces[:count]))
    assert stream.result.finish_reason == "stop"
    assert (stream.result.stop is None) == (shown == text)


def test_a_stop_string_is_looked_for_in_the_answer_not_in_the_thought(engine: lily_py.Engine) -> None:
    script = scripted(engine, "a stop here\n</think>\n\nand a stop there")
    result = engine.generate("x", stop="stop", logits_processors=script)
    assert (result.reasoning, result.text) == ("a stop here", "and a ")


def test_thought_and_answer_are_told_apart(engine: lily_py.Engine) -> None:
    script = scripted(engine, "hm, 7\n</think>\n\nSeven.")
    with engine.stream("what is 3+4?", logits_processors=script) as stream:
        chunks = list(stream)
    result = stream.result
    assert "".join(chunk.reasoning for chunk in chunks) == result.reasoning == "hm, 7"
    assert result.text == "Seven."
    assert result.usage.reasoning_tokens == len("hm, 7\n") + 1
    assert result._repr_markdown_() == "> hm, 7\n\nSeven."


def test_cut_off_in_the_thought_there_is_no_answer(engine: lily_py.Engine) -> None:
    script = scripted(engine, "I wonder")
    result = engine.generate("x", logits_processors=script, max_tokens=5)
    assert (result.text, result.reasoning, result.finish_reason) == ("", "I won", "length")
    assert result.usage.reasoning_tokens == 5


def test_without_thinking_there_is_no_reasoning(engine: lily_py.Engine) -> None:
    result = engine.generate("x", thinking=False, logits_processors=scripted(engine, "Yes."))
    assert (result.text, result.reasoning, result.usage.reasoning_tokens) == ("Yes.", None, 0)


def test_tool_calls_come_typed_with_their_reason(engine: lily_py.Engine) -> None:
    script = scripted(engine, "I need data.\n</think>\n\nLet me look.\n" + CALL)
    with engine.stream("rain?", tools=TOOLS, logits_processors=script) as stream:
        calls = [call for chunk in stream for call in chunk.tool_calls]
    result = stream.result
    assert [(call.name, call.arguments) for call in calls] == [("weather", {"city": "Zürich", "days": 3})]
    assert tuple(calls) == result.tool_calls
    assert (result.text, result.finish_reason) == ("Let me look.", "tool_calls")
    assert result.message["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich", "days": 3}
    assert "weather" in repr(result)


def test_the_answer_goes_back_into_the_conversation(engine: lily_py.Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": "rain?"}]
    result = engine.chat(messages, tools=TOOLS, logits_processors=scripted(engine, "</think>" + CALL))
    messages += [result.message, {"role": "tool", "content": "wet"}]
    again = engine.chat(messages, tools=TOOLS, logits_processors=scripted(engine, "</think>Rain."))
    assert again.text == "Rain."


def test_a_call_cut_off_is_no_call(engine: lily_py.Engine) -> None:
    script = scripted(engine, "</think>" + CALL)
    result = engine.generate("x", tools=TOOLS, logits_processors=script, max_tokens=30)
    assert (result.tool_calls, result.finish_reason) == ((), "length")


def test_cancel_ends_with_what_there_was(engine: lily_py.Engine) -> None:
    stream = engine.stream(ids_of(5), **NO_END)
    first = [next(stream) for _ in range(3)]
    stream.cancel()
    last = list(stream)
    assert [chunk.finish_reason for chunk in last] == ["cancelled"]
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.token_ids == tuple(token for chunk in first for token in chunk.token_ids)
    assert list(stream) == []


def test_leaving_the_block_ends_the_stream(engine: lily_py.Engine) -> None:
    with engine.stream(ids_of(5), **NO_END) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.usage.completion_tokens == 1
    stream.close()


def test_result_before_the_end_is_refused(engine: lily_py.Engine) -> None:
    with engine.stream(ids_of(5), **NO_END) as stream:
        next(stream)
        assert not stream.ended
        with pytest.raises(lily_py.LilyError, match="hasn't ended"):
            _ = stream.result


def test_dropping_a_stream_cancels_it(engine: lily_py.Engine) -> None:
    stream = engine.stream(ids_of(5), **NO_END)
    next(stream)
    generation = stream._generation
    del stream
    gc.collect()
    assert generation.finish_reason == "cancelled"


def test_b30_cancel_acts_from_another_thread(engine: lily_py.Engine) -> None:
    stream = engine.stream(ids_of(5), **NO_END)
    begun = threading.Event()

    def cancel() -> None:
        begun.wait()
        stream.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    for _ in stream:
        begun.set()
    thread.join()
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.token_ids) < 3000


def test_close_from_another_thread_waits_until_it_has_stopped(engine: lily_py.Engine) -> None:
    stream = engine.stream(ids_of(5), **NO_END)
    begun = threading.Event()

    def read() -> None:
        for _ in stream:
            begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    thread.join()


def test_b30_cancel_acts_within_the_prefill(engine: lily_py.Engine) -> None:
    begun, cancelled = threading.Event(), threading.Event()
    seen: list[int] = []

    def progress(done: int, _: int) -> None:
        seen.append(done)
        begun.set()
        cancelled.wait(5)

    stream = engine.stream(ids_of(3500), progress=progress, **{**NO_END, "max_tokens": 100})

    def cancel() -> None:
        begun.wait()
        stream.cancel()
        cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    chunks = list(stream)
    thread.join()
    assert [chunk.finish_reason for chunk in chunks] == ["cancelled"]
    assert stream.result.token_ids == ()
    assert len(seen) == 1
    assert seen[0] < 3500
    assert engine.generate(ids_of(5), max_tokens=2, temperature=0).usage.completion_tokens == 2


def test_closing_from_within_a_step_is_safe(engine: lily_py.Engine) -> None:
    def close_it(_: list[int], logits: np.ndarray) -> np.ndarray:
        stream.close()
        return logits

    stream = engine.stream(ids_of(5), logits_processors=[close_it], **NO_END)
    assert [chunk.finish_reason for chunk in stream] == [None, "cancelled"]


@pytest.mark.parametrize("length", [5, 3500])
def test_ctrl_c_leaves_the_engine_usable(engine: lily_py.Engine, length: int) -> None:
    prompt = ids_of(length)
    keywords = {**NO_END, "max_tokens": 500}
    expected = engine.prefill(prompt[:4])
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def slow(_: list[int], logits: np.ndarray) -> np.ndarray:
        begun.set()
        time.sleep(0.01)
        return logits

    thread = threading.Thread(target=interrupt)
    thread.start()
    if length > 1000:
        keywords["progress"] = lambda done, total: begun.set() or time.sleep(0.05)
    else:
        keywords["logits_processors"] = [slow]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt, **keywords)
    thread.join()
    np.testing.assert_array_equal(engine.prefill(prompt[:4]), expected)
    cold = engine.generate(prompt, temperature=0, max_tokens=8).token_ids
    engine._runtime.store.clear()
    assert engine.generate(prompt, temperature=0, max_tokens=8).token_ids == cold
