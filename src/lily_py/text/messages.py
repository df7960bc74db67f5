"""Conversations as clients send them, brought into the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lily_py.errors import TemplateError

Message = dict[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as templates want them; the caller's are left alone.

    - ``developer`` is ``system``. System messages after the first one are merged into it, at the front, with
      an empty line between: templates accept one, at the beginning.
    - A content of text parts becomes one string; null becomes "" for an assistant.
    - ``function.arguments`` given as JSON text becomes an object; "" and null become {}.
    - ``reasoning`` is taken as ``reasoning_content``.

    Raises:
        TemplateError: names the message, as ``messages[3]``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of objects, got {type(messages).__name__}")
    if not messages:
        raise TemplateError("messages is empty")
    system: list[str] = []
    others: list[Message] = []
    extra: Message = {}
    for i, message in enumerate(messages):
        normalised = _message(message, f"messages[{i}]")
        if normalised["role"] == "system":
            extra = extra or normalised
            system.append(normalised["content"])
        else:
            others.append(normalised)
    if not system:
        return others
    return [{**extra, "content": "\n\n".join(text for text in system if text)}, *others]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form; a bare function description is wrapped. None and [] are no tools.

    Raises:
        TemplateError: names the tool, as ``tools[0]``.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise TemplateError(f"tools must be a list of objects, got {type(tools).__name__}")
    result = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TemplateError(f"tools[{i}] must be an object, got {type(tool).__name__}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TemplateError(f"tools[{i}] has no function name")
        result.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return result or None


def _message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateError(f"{where}: role must be a string, got {role!r}")
    result = dict(message)
    result["role"] = role = "system" if role == "developer" else role
    result["content"] = _content(message.get("content"), role, where)
    if isinstance(message.get("reasoning"), str) and message.get("reasoning_content") is None:
        result["reasoning_content"] = message["reasoning"]
    calls = message.get("tool_calls")
    if calls is None:
        result.pop("tool_calls", None)
    elif isinstance(calls, Sequence) and not isinstance(calls, str):
        result["tool_calls"] = [_tool_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        raise TemplateError(f"{where}: tool_calls must be a list, got {type(calls).__name__}")
    return result


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TemplateError(
            f"{where}: content must be a string or a list of parts, got {type(content).__name__}"
        )
    return "".join(_part(part, f"{where}: content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise TemplateError(f"{where}: a part of type {kind!r}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise TemplateError(f"{where}: text must be a string, got {type(text).__name__}")
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return one call of an assistant message with its arguments as an object."""
    if not isinstance(call, Mapping):
        # A `ToolCall` of an earlier answer.
        call = {key: getattr(call, key, None) for key in ("id", "name", "arguments")}
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{where}: arguments aren't valid JSON ({error})") from error
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{where}: arguments must be an object, got {type(arguments).__name__}")
    result = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return result if call.get("id") is None else {"id": call["id"], **result}
