"""An answer taken apart while it streams: thought, text and tool calls.

How a stream is cut into pieces never changes the result: what a tag could still begin with is held back.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lily_py.text.stop_strings import partial_suffix
from lily_py.text.tool_calls import ToolCall, parse_function, parse_json_call, tool_schemas

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
_IN_FUNCTION = re.compile("|".join(map(re.escape, (PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE))))


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the thought."""

    text: str


Event = TextDelta | ReasoningDelta | ToolCall


@dataclass
class ParsedAnswer:
    """A whole answer.

    Attributes:
        text: what is meant for the reader.
        reasoning: the thought; None if there was none, "" if it was empty.
        tool_calls: in order.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


class _State(enum.Enum):
    START = enum.auto()
    """Nothing but white space so far: a ``<think>`` may follow."""
    THOUGHT = enum.auto()
    TEXT = enum.auto()
    ENVELOPE = enum.auto()
    """After ``<tool_call>``, before a function."""
    FUNCTION = enum.auto()
    VALUE = enum.auto()
    """Within a parameter, where only ``</parameter>`` counts."""
    JSON = enum.auto()
    AFTER_FUNCTION = enum.auto()


class AnswerParser:
    """Splits a streamed answer into events.

    - A thought ends at ``</think>``; line breaks around it are dropped. Call syntax inside it is no call. If
      the stream ends within it, all of it is reasoning and there is no text.
    - With tools, each call becomes one `ToolCall` when its function is complete, whether or not
      ``</tool_call>`` follows; white space around calls is dropped, and text on both sides of calls is joined
      by an empty line. What is cut off within a function, or isn't a call after all, stays text: nothing is
      lost and nothing invented.

    Args:
        thinking: the answer begins inside a thought (see `ends_in_thinking`).
        tools: as given to the template; None leaves call syntax in the text.
    """

    def __init__(self, *, thinking: bool = False, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.had_thought = thinking
        """Whether a thought has begun."""
        self._schemas = tool_schemas(tools)
        self._find_calls = tools is not None
        self._state = _State.START
        self._steps = {
            _State.START: self._step_start,
            _State.THOUGHT: self._step_thought,
            _State.TEXT: self._step_text,
            _State.ENVELOPE: self._step_envelope,
            _State.FUNCTION: self._step_function,
            _State.VALUE: self._step_value,
            _State.JSON: self._step_json,
            _State.AFTER_FUNCTION: self._step_after_function,
        }
        self._events: list[Event] = []
        self._buffer = ""
        self._trim_left = False
        self._had_calls = False
        self._had_text = False
        self._join_text = False
        # Positions in the buffer while it holds a call.
        self._scanned = 0
        self._call_start = 0
        self._call_opened = 0
        self._function_start = 0
        self._function_end = 0
        self._value_start = 0
        self._lenient = False

    def feed(self, text: str) -> list[Event]:
        """Take more text and return what is certain now."""
        self._buffer += text
        self._advance()
        return self._take()

    def finish(self) -> list[Event]:
        """End the stream and return the rest."""
        while not self._end():
            self._advance()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        """Change state until more text is needed."""
        while self._steps[self._state]():
            pass

    # Each step returns true if the state changed, false if it needs more text.

    def _step_start(self) -> bool:
        content = self._buffer.lstrip()
        if _could_become(content, THINK_OPEN):
            return False
        if content.startswith(THINK_OPEN):
            self._buffer = content[len(THINK_OPEN) :]
            self.had_thought = True
        self._trim_left = self.had_thought
        self._state = _State.THOUGHT if self.had_thought else _State.TEXT
        return True

    def _step_thought(self) -> bool:
        end = self._buffer.find(THINK_CLOSE)
        if end < 0:
            sure = len(self._buffer) - partial_suffix(self._buffer, THINK_CLOSE)
            self._emit_reasoning(len(self._buffer[:sure].rstrip("\n")))
            return False
        self._emit_reasoning(len(self._buffer[:end].rstrip("\n")))
        self._buffer = self._buffer.lstrip("\n")[len(THINK_CLOSE) :]
        self._trim_left = True
        self._state = _State.TEXT
        return True

    def _step_text(self) -> bool:
        if self._trim_left:
            self._buffer = self._buffer.lstrip() if self._had_calls else self._buffer.lstrip("\n")
            self._trim_left = not self._buffer
        if not self._find_calls:
            self._emit_text(len(self._buffer))
            return False
        start = self._buffer.find(CALL_OPEN)
        if start < 0:
            sure = len(self._buffer) - partial_suffix(self._buffer, CALL_OPEN)
            self._emit_text(len(self._buffer[:sure].rstrip()))
            return False
        text_end = len(self._buffer[:start].rstrip())
        self._emit_text(text_end)
        self._call_start = start - text_end
        self._call_opened = self._scanned = self._call_start + len(CALL_OPEN)
        self._state = _State.ENVELOPE
        return True

    def _step_envelope(self) -> bool:
        content = self._buffer[self._scanned :].lstrip()
        if _could_become(content, FUNCTION_OPEN):
            return False
        self._function_start = len(self._buffer) - len(content)
        self._scanned = self._function_start
        if content.startswith(FUNCTION_OPEN):
            self._state = _State.FUNCTION
        elif content.startswith("{"):
            self._state = _State.JSON
        else:
            self._reject()
        return True

    def _step_function(self) -> bool:
        tag = _IN_FUNCTION.search(self._buffer, self._scanned)
        if tag is None:
            self._scanned = max(self._scanned, len(self._buffer) - len(PARAMETER_CLOSE))
            return False
        if tag.group() == PARAMETER_OPEN:
            self._value_start = self._scanned = tag.end()
            self._state = _State.VALUE
        else:
            self._function_end = tag.end() if tag.group() == FUNCTION_CLOSE else tag.start()
            self._state = _State.AFTER_FUNCTION
        return True

    def _step_value(self) -> bool:
        end = self._buffer.find(PARAMETER_CLOSE, self._scanned)
        if end < 0:
            self._scanned = max(self._scanned, len(self._buffer) - len(PARAMETER_CLOSE))
            return False
        self._scanned = end + len(PARAMETER_CLOSE)
        self._state = _State.FUNCTION
        return True

    def _step_json(self) -> bool:
        end = self._buffer.find(CALL_CLOSE, self._scanned)
        if end < 0:
            self._scanned = max(self._scanned, len(self._buffer) - len(CALL_CLOSE))
            return False
        self._accept(parse_json_call(self._buffer[self._function_start : end]), end + len(CALL_CLOSE))
        return True

    def _step_after_function(self) -> bool:
        content = self._buffer[self._function_end :].lstrip()
        if _could_become(content, CALL_CLOSE) or _could_become(content, FUNCTION_OPEN):
            return False
        end = self._function_end
        if content.startswith(CALL_CLOSE):
            end = len(self._buffer) - len(content) + len(CALL_CLOSE)
        if self._accept_function(end) and content.startswith(FUNCTION_OPEN):
            # A second function in the same envelope.
            self._buffer = content
            self._call_start = self._call_opened = self._scanned = 0
            self._state = _State.ENVELOPE
        return True

    def _end(self) -> bool:
        """Settle the current state at the end of the stream; return false if text is left to look at."""
        match self._state:
            case _State.START | _State.THOUGHT if self.had_thought:
                self._trim_left = self._trim_left or self._state is _State.START
                self._emit_reasoning(len(self._buffer.rstrip("\n")))
            case _State.START:
                self._emit_text(len(self._buffer))
            case _State.TEXT:
                self._emit_text(len(self._buffer.rstrip() if self._had_calls else self._buffer))
            case _State.AFTER_FUNCTION:
                # What follows is white space or the beginning of a closing tag.
                self._accept_function(len(self._buffer))
                return not self._buffer
            case _State.JSON:
                self._accept(parse_json_call(self._buffer[self._function_start :]), len(self._buffer))
                return not self._buffer
            case _State.VALUE if (end := self._buffer.find(FUNCTION_CLOSE, self._value_start)) >= 0:
                # The model forgot </parameter> and closed the function.
                self._lenient = True
                self._function_end = end + len(FUNCTION_CLOSE)
                self._state = _State.AFTER_FUNCTION
                return False
            case _:
                self._reject()
                return False
        self._buffer = ""
        return True

    def _accept_function(self, end: int) -> bool:
        text = self._buffer[self._function_start : self._function_end]
        lenient, self._lenient = self._lenient, False
        return self._accept(parse_function(text, self._schemas, lenient=lenient), end)

    def _accept(self, call: tuple[str, dict[str, Any]] | None, end: int) -> bool:
        """Emit the call that the buffer holds up to `end`; if it is none, take it for text."""
        if call is None:
            self._reject()
            return False
        name, arguments = call
        self._events.append(ToolCall(name, arguments, raw=self._buffer[self._call_start : end]))
        self._buffer = self._buffer[end:]
        self._had_calls = self._trim_left = True
        self._join_text = self._had_text
        self._state = _State.TEXT
        return True

    def _reject(self) -> None:
        """Take the tag that seemed to open a call for text, and go on after it."""
        self._emit_text(max(self._call_opened, 1))
        self._state = _State.TEXT

    def _emit_text(self, end: int) -> None:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text:
            self._events.append(TextDelta("\n\n" + text if self._join_text else text))
            self._had_text, self._join_text = True, False

    def _emit_reasoning(self, end: int) -> None:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._trim_left:
            text = text.lstrip("\n")
        if text:
            self._trim_left = False
            self._events.append(ReasoningDelta(text))


def parse_answer(
    text: str, *, thinking: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
) -> ParsedAnswer:
    """Take a whole answer apart; arguments as for `AnswerParser`."""
    parser = AnswerParser(thinking=thinking, tools=tools)
    return collect(parser, [*parser.feed(text), *parser.finish()])


def collect(parser: AnswerParser, events: Sequence[Event]) -> ParsedAnswer:
    """Join all events of a finished parser into the answer."""
    return ParsedAnswer(
        text="".join(event.text for event in events if isinstance(event, TextDelta)),
        reasoning=(
            "".join(event.text for event in events if isinstance(event, ReasoningDelta))
            if parser.had_thought
            else None
        ),
        tool_calls=[event for event in events if isinstance(event, ToolCall)],
    )


def _could_become(text: str, tag: str) -> bool:
    """Tell whether more text could turn `text` into something that begins with `tag`."""
    return len(text) < len(tag) and tag.startswith(text)
