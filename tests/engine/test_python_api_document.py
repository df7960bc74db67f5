"""The examples of docs/python-api.md run as they stand, on the demo model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import lily

DOCUMENT = Path(__file__).parents[2] / "docs" / "python-api.md"


def test_examples_of_the_document_run(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    with lily.Engine.load("demo", threads=1) as engine:
        names: dict[str, Any] = {
            "tools": [{"name": "weather", "parameters": {"type": "object", "properties": {}}}],
            "look_up": lambda name, **arguments: "sunny",
            "enough": lambda: True,
        }
        for block in blocks:
            if "response_format" in block and importlib.util.find_spec("llguidance") is None:
                continue  # its own tests say what is missing
            # The first example closes its own engine.
            names["engine"] = engine
            exec(compile(block, str(DOCUMENT), "exec"), names)
    assert capsys.readouterr().out


def test_everything_public_is_importable_from_lily() -> None:
    import lily_py

    for name in lily_py.__all__:
        assert getattr(lily, name) is getattr(lily_py, name)
