"""Between people and the model: tokens, streamed text, chat templates, thoughts, tool calls, stop strings."""

from lily_py.text.detokenizer import Detokenizer
from lily_py.text.messages import normalise_messages, normalise_tools
from lily_py.text.parsing import (
    AnswerParser,
    Event,
    ParsedAnswer,
    ReasoningDelta,
    TextDelta,
    collect,
    parse_answer,
)
from lily_py.text.stop_strings import StopStrings
from lily_py.text.template import ChatTemplate, ends_in_thinking
from lily_py.text.tokenizer import Tokenizer
from lily_py.text.tool_calls import ToolCall

__all__ = [
    "AnswerParser",
    "ChatTemplate",
    "Detokenizer",
    "Event",
    "ParsedAnswer",
    "ReasoningDelta",
    "StopStrings",
    "TextDelta",
    "Tokenizer",
    "ToolCall",
    "collect",
    "ends_in_thinking",
    "normalise_messages",
    "normalise_tools",
    "parse_answer",
]
