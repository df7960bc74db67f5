"""Decide whether an answer of the demo model is right."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\n(.*?)</function>\s*</tool_call>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.S)


def calls_in(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tool calls in `text` as {name, arguments}, arguments typed by the tool's schema."""
    schemas = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools}
    calls = []
    for name, body in _CALL.findall(text):
        properties = schemas.get(name, {})
        arguments: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(body):
            typed = properties.get(key, {}).get("type", "string") != "string"
            try:
                arguments[key] = json.loads(value) if typed else value
            except json.JSONDecodeError:
                arguments[key] = value
        calls.append({"name": name, "arguments": arguments})
    return calls


def judge(question: dict[str, Any], text: str) -> bool:
    """Return whether `text`, which starts inside the think block if thinking is on, answers `question`.

    The answer stands after the reasoning, which must have ended; it holds the expected text or is exactly the
    expected calls.
    """
    answer = text
    if question["thinking"]:
        if "</think>" not in text:
            return False
        answer = text.split("</think>", 1)[1]
    expect = question["expect"]
    if "tool_calls" in expect:
        return calls_in(answer, question["tools"]) == expect["tool_calls"]
    return expect["contains"] in answer and "<tool_call>" not in answer
