"""Tool calls as the model writes them, and their arguments in the types of the tool's JSON schema.

The format of Qwen3-Coder and Qwen3.5 and later::

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value, over any number of lines
    </parameter>
    </function>
    </tool_call>

Inside ``<tool_call>`` a JSON object with name and arguments (Hermes, Qwen3-Next) is understood as well.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FUNCTION = re.compile(r"<function=\s*([^\s<>]+)[ \t]*>?")
_PARAMETER = re.compile(r"<parameter=\s*([^\s<>]+)[ \t]*>?")
# A value ends at its closing tag; a model that forgets it has still ended it where the next tag begins.
_VALUE_END = re.compile(r"</parameter>")
_LENIENT_VALUE_END = re.compile(r"</parameter>|(?=<parameter=)|(?=</function>)|(?=</tool_call>)|\Z")


_TYPES = frozenset({"string", "boolean", "integer", "number", "object", "array", "null"})
_MAX_SCHEMA_NODES = 256
"""Schemas may refer to themselves."""


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asks for.

    Attributes:
        name: the function's name, as written.
        arguments: typed by the tool's schema where it has one.
        raw: the text that said so, envelope included.
        id: a name for the call, for the tool's result to refer to.
    """

    name: str
    arguments: dict[str, Any]
    raw: str = field(default="", compare=False)
    id: str = field(default_factory=_new_id, compare=False)


Schemas = dict[str, Mapping[str, Any]]


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """Return function name -> its parameters' JSON schema, from tools in OpenAI's form or bare functions."""
    schemas: Schemas = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def parse_function(
    text: str, schemas: Schemas, *, lenient: bool = False
) -> tuple[str, dict[str, Any]] | None:
    """Parse ``<function=NAME>…``; return (name, arguments), or None if there is no name.

    Args:
        text: from ``<function=`` on.
        schemas: from `tool_schemas`.
        lenient: let values end at the next tag where ``</parameter>`` is missing.
    """
    opening = _FUNCTION.match(text)
    if opening is None:
        return None
    name = opening.group(1)
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    position = opening.end()
    while parameter := _PARAMETER.search(text, position):
        end = (_LENIENT_VALUE_END if lenient else _VALUE_END).search(text, parameter.end())
        if end is None:
            break
        value = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        key = parameter.group(1)
        arguments[key] = typed_value(value, properties.get(key), schema)
        position = end.end()
    return name, arguments


def parse_json_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Parse ``{"name": …, "arguments": {…}}``; return (name, arguments), or None if it isn't that."""
    try:
        call = json.loads(text, strict=False)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], arguments


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a written value in the type that the schema asks for; the text itself where it doesn't fit.

    Accepts both JSON's and Python's spellings (``true`` and ``True``, ``null`` and ``None``), as the model
    has seen both. ``null`` for a string stays text unless the schema allows null.

    Args:
        text: the value, its enclosing newlines removed.
        schema: JSON schema of the parameter; the value of an unknown parameter stays text.
        root: schema that ``$ref`` refers to.
    """
    if not isinstance(schema, Mapping):
        return text
    types = _types(schema, root)
    stripped = text.strip()
    if stripped in ("null", "None") and ("null" in types or (types and "string" not in types)):
        return None
    for kind in ("boolean", "integer", "number", "object", "array"):
        if kind in types:
            accepted, value = _convert(stripped, kind)
            if accepted:
                return value
    if not types:
        # Of a parameter that may be anything only what can't be meant as prose is taken for data.
        for kind in ("object", "array"):
            accepted, value = _convert(stripped, kind)
            if accepted:
                return value
    return text


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows, as far as it says; references and alternatives included."""
    found: set[str] = set()
    pending = [schema]
    for _ in range(_MAX_SCHEMA_NODES):
        if not pending:
            break
        node = pending.pop()
        if not isinstance(node, Mapping):
            continue
        declared = node.get("type")
        names = declared if isinstance(declared, list) else [declared]
        types = {_canonical_type(name) for name in names if isinstance(name, str)} & _TYPES
        if not types:
            values = node["enum"] if isinstance(node.get("enum"), list) else []
            types = {_type_of(value) for value in (*values, *([node["const"]] if "const" in node else []))}
        found |= types
        for key in ("anyOf", "oneOf", "allOf"):
            pending.extend(node[key] if isinstance(node.get(key), list) else [])
        if isinstance(node.get("$ref"), str):
            pending.append(_referenced(node["$ref"], root))
    return found


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Follow a reference within the schema, such as ``#/$defs/Colour``."""
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _canonical_type(kind: str) -> str:
    """Return JSON schema's name for the spellings of types that tools use."""
    kind = kind.strip().lower()
    if kind in ("str", "text", "varchar", "char", "enum"):
        return "string"
    if kind in ("bool", "binary"):
        return "boolean"
    if kind.startswith(("int", "uint", "long", "short", "unsigned")):
        return "integer"
    if kind.startswith(("num", "float", "double")):
        return "number"
    if kind.startswith("dict"):
        return "object"
    if kind.startswith(("arr", "list", "tuple")):
        return "array"
    return kind


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object" if isinstance(value, dict) else "array"


def _convert(text: str, kind: str) -> tuple[bool, Any]:
    """Return (whether it fits, value)."""
    if kind == "boolean":
        return text.lower() in ("true", "false"), text.lower() == "true"
    if kind in ("integer", "number"):
        return _number(text, kind == "integer")
    wanted = dict if kind == "object" else list
    if not text.startswith("{" if kind == "object" else ("[", "(")):
        return False, None
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return False, None
    if isinstance(value, tuple) and wanted is list:
        value = list(value)
    return isinstance(value, wanted), value


def _number(text: str, whole: bool) -> tuple[bool, int | float | None]:
    """Read a decimal number; ``5.0`` is a whole number too."""
    if re.fullmatch(r"[+-]?\d{1,4000}", text, re.ASCII):
        return True, int(text)
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
        return False, None
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return False, None
    if value.is_integer() and (whole or "e" not in text.lower()):
        return True, int(value)
    return (False, None) if whole else (True, value)
