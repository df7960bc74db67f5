"""What is written to a terminal and to a file: dimmed thoughts, NO_COLOR, control characters, calls."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from lily_py.cli.terminal import AnswerPrinter, Statistics
from lily_py.results import Chunk, Result, Timings, Usage
from lily_py.text import ToolCall

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
ANSWER = [Chunk(reasoning="I "), Chunk(reasoning="see."), Chunk(text="Y"), Chunk(text="es.")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(out: io.StringIO, chunks: Sequence[Chunk], reasoning: bool | None = None) -> str:
    printer = AnswerPrinter(out, reasoning)
    for chunk in chunks:
        printer.feed(chunk)
    printer.end()
    return out.getvalue()


def test_a_thought_is_dimmed_on_a_terminal() -> None:
    assert printed(Terminal(), ANSWER) == f"{DIM}I see.{PLAIN}\n\nYes.\n"


def test_a_thought_cut_off_leaves_no_dim_terminal() -> None:
    assert printed(Terminal(), ANSWER[:1]) == f"{DIM}I {PLAIN}\n"


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colour_a_thought_stands_in_tags(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert printed(Terminal(), ANSWER) == "<think>\nI see.\n</think>\n\nYes.\n"


def test_an_empty_no_color_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert DIM in printed(Terminal(), ANSWER)


def test_a_file_gets_the_answer_alone_or_the_thought_in_tags() -> None:
    assert printed(io.StringIO(), ANSWER) == "Yes.\n"
    assert printed(io.StringIO(), ANSWER, reasoning=True) == "<think>\nI see.\n</think>\n\nYes.\n"


def test_a_terminal_can_do_without_the_thought() -> None:
    assert printed(Terminal(), ANSWER, reasoning=False) == "Yes.\n"


def test_a_model_cannot_steer_the_terminal_but_a_file_gets_what_it_wrote() -> None:
    chunks = [Chunk(text="a\x1b[2J\x07\tb\r\nc\x9b1m\x7f")]
    assert printed(Terminal(), chunks) == "a␛[2J␇\tb␍\nc\ufffd1m␡\n"
    assert printed(io.StringIO(), chunks) == "a\x1b[2J\x07\tb\r\nc\x9b1m\x7f\n"


def test_calls_are_written_one_a_line() -> None:
    chunks = [
        Chunk(text="Let me look."),
        Chunk(tool_calls=(ToolCall("weather", {"city": "Oslo", "days": 2}), ToolCall("now", {}))),
    ]
    assert printed(io.StringIO(), chunks) == "Let me look.\nweather(city='Oslo', days=2)\nnow()\n"


def test_each_chunk_is_flushed_as_it_comes() -> None:
    flushed: list[str] = []

    class Recorder(Terminal):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    printed(Recorder(), ANSWER[2:])
    assert flushed[:2] == ["Y", "Yes."]


def result(prompt: int, cached: int, generated: int, peak: int) -> Result:
    return Result(
        "",
        (),
        "stop",
        usage=Usage(prompt_tokens=prompt, completion_tokens=generated, cached_tokens=cached),
        timings=Timings(
            prefill_seconds=0.5,
            prefill_tokens_per_second=(prompt - cached) / 0.5,
            decode_seconds=2.0,
            decode_tokens_per_second=(generated - 1) / 2.0,
            peak_memory_bytes=peak,
        ),
    )


def test_figures_of_several_answers_are_those_of_all_their_tokens_and_seconds() -> None:
    statistics = Statistics()
    statistics.add(result(100, 0, 11, 2_000_000_000))
    statistics.add(result(300, 250, 31, 1_500_000_000))
    assert list(statistics.lines()) == [
        "Prompt: 400 tokens (250 cached), 150.0 tokens/s",
        "Generation: 42 tokens, 10.0 tokens/s",
        "Peak memory: 2.000 GB",
    ]


def test_drafts_are_told_where_there_were_any() -> None:
    statistics = Statistics()
    for drafted, accepted in ((20, 15), (0, 0), (3, 1)):
        usage = Usage(completion_tokens=10, drafted_tokens=drafted, accepted_tokens=accepted)
        statistics.add(Result("", (), "stop", usage=usage))
    assert list(statistics.lines())[1] == "Generation: 30 tokens (16 of 23 drafts accepted), - tokens/s"


def test_what_was_not_measured_has_no_rate() -> None:
    statistics = Statistics()
    statistics.add(Result("", (), "cancelled", usage=Usage(prompt_tokens=3)))
    assert list(statistics.lines())[:2] == [
        "Prompt: 3 tokens, - tokens/s",
        "Generation: 0 tokens, - tokens/s",
    ]
