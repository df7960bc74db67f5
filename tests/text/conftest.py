"""A byte-level tokenizer, templates and tools for tests of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from oracles import textfiles

from lily_py import demo
from lily_py.checkpoint.chat_template import read_chat_template
from lily_py.text import ChatTemplate, Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    textfiles.write(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture(scope="session")
def qwen_template() -> str:
    """The chat template of Qwen3.6, which this project doesn't carry."""
    path = os.environ.get("LILY_QWEN_TEMPLATE")
    if not path:
        pytest.skip("set LILY_QWEN_TEMPLATE to the chat_template.jinja of a Qwen3.6 checkpoint")
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture(scope="session", params=["tiny", "demo", "qwen"])
def template_source(request: pytest.FixtureRequest) -> str:
    """Each template that there is."""
    if request.param == "qwen":
        return str(request.getfixturevalue("qwen_template"))
    return textfiles.CHAT_TEMPLATE if request.param == "tiny" else str(read_chat_template(demo.path()))


@pytest.fixture(scope="session")
def template(template_source: str) -> ChatTemplate:
    """Each template, compiled once."""
    return ChatTemplate(template_source)


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    properties = {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "colour": {"enum": ["red", "green"]},
        "size": {"$ref": "#/$defs/Size"},
        "anything": {},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"Size": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": "work", "description": "Works.", "parameters": parameters}},
        {
            "type": "function",
            "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}},
        },
    ]
