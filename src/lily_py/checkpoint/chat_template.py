"""Where a checkpoint keeps its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lily_py.checkpoint.fields import MAX_JSON_BYTES, read_json
from lily_py.errors import CheckpointError


def read_chat_template(folder: Path) -> str | None:
    """Return the source of a folder's chat template, or None if it has none.

    Looked for in ``chat_template.jinja``, then under ``chat_template`` in ``chat_template.json`` and
    ``tokenizer_config.json``: a string, or a list of named templates of which ``default`` is taken.

    Raises:
        CheckpointError: a file is damaged, or a template isn't text.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: isn't UTF-8 ({error})") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = _default(read_json(path).get("chat_template"), path) if path.is_file() else None
        if template is not None:
            return template
    return None


def _default(value: Any, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    named = {}
    if isinstance(value, dict):
        named = value
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry.get("name"), str)
        }
    template = named.get("default")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{path}: chat_template must be a string or a list of named templates with one called 'default'"
        )
    return template
