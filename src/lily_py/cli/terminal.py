"""What a person sees: the answer as it grows, its thought dimmed, and the figures at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from lily_py.errors import LilyError
from lily_py.results import Chunk, Result
from lily_py.text import ToolCall

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
"""Control characters -> their pictures: a model's text mustn't steer the terminal."""


def has_colour(stream: TextIO) -> bool:
    """Tell whether a stream takes colours: a terminal that isn't dumb, and no NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def notice(text: str) -> None:
    """Tell the person something that isn't part of the answer."""
    dim, plain = (DIM, PLAIN) if has_colour(sys.stderr) else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def read_text(given: str | None) -> str | None:
    """Return a text argument; stdin's for ``-``, or for None if stdin isn't a terminal; else None.

    Raises:
        LilyError: stdin isn't text.
    """
    if given not in (None, "-"):
        return given
    if given is None and sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise LilyError(f"stdin isn't {error.encoding} text: {error.reason} at byte {error.start}") from error


class AnswerPrinter:
    """Writes the chunks of an answer as they come.

    On a terminal the thought is dimmed; without colour it stands between ``<think>`` and ``</think>``.

    Args:
        out: where to.
        reasoning: show the thought; None shows it on a terminal only, so that a pipe gets the bare answer.
    """

    def __init__(self, out: TextIO, reasoning: bool | None = None) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._colour = has_colour(out)
        self._reasoning = self._terminal if reasoning is None else reasoning
        self._in_thought = False
        self._line_ended = True

    def feed(self, chunk: Chunk) -> None:
        """Write what a chunk brought."""
        if chunk.reasoning and self._reasoning:
            if not self._in_thought:
                self._in_thought = True
                self._write(DIM if self._colour else "<think>\n", own=True)
            self._write(chunk.reasoning)
        if chunk.text or chunk.tool_calls:
            self._leave_thought("\n\n")
            self._write(chunk.text)
        for call in chunk.tool_calls:
            self._write(("" if self._line_ended else "\n") + format_call(call) + "\n")
        self._out.flush()

    def end(self) -> None:
        """Close what is open and end the line."""
        self._leave_thought("\n")
        if not self._line_ended:
            self._write("\n")
        self._out.flush()

    def _leave_thought(self, gap: str) -> None:
        if self._in_thought:
            self._in_thought = False
            self._write(PLAIN if self._colour else "\n</think>", own=True)
            self._write(gap)

    def _write(self, text: str, *, own: bool = False) -> None:
        if text:
            self._out.write(text.translate(_VISIBLE) if self._terminal and not own else text)
            self._line_ended = text.endswith("\n")


def format_call(call: ToolCall) -> str:
    """Return a tool call as Python would write it."""
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


@dataclass
class Statistics:
    """Tokens, seconds and memory of one answer, or of several together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    prefilled_tokens: float = 0.0
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    peak_memory: int = 0

    def add(self, result: Result) -> None:
        """Count an answer."""
        usage, timings = result.usage, result.timings
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.prefill_seconds += timings.prefill_seconds
        self.prefilled_tokens += timings.prefill_tokens_per_second * timings.prefill_seconds
        self.generated_tokens += usage.completion_tokens
        self.decode_seconds += timings.decode_seconds
        self.decoded_tokens += max(0, usage.completion_tokens - 1)
        self.drafted_tokens += usage.drafted_tokens
        self.accepted_tokens += usage.accepted_tokens
        self.peak_memory = max(self.peak_memory, timings.peak_memory_bytes)

    def lines(self) -> Iterable[str]:
        """Return the lines that people paste: prompt, generation, peak memory."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        yield (
            f"Prompt: {self.prompt_tokens} tokens{cached}, "
            f"{_rate(self.prefilled_tokens, self.prefill_seconds)} tokens/s"
        )
        rate = _rate(self.decoded_tokens, self.decode_seconds)
        drafts = (
            f" ({self.accepted_tokens} of {self.drafted_tokens} drafts accepted)"
            if self.drafted_tokens
            else ""
        )
        yield f"Generation: {self.generated_tokens} tokens{drafts}, {rate} tokens/s"
        yield f"Peak memory: {self.peak_memory / 1e9:.3f} GB"

    def show(self) -> None:
        """Write the lines to stderr."""
        for line in self.lines():
            notice(line)


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:.1f}" if tokens and seconds else "-"
