"""The named control tokens of `tokenizer_config.json`."""

from __future__ import annotations

from pathlib import Path

from lily_py.checkpoint.fields import read_json
from lily_py.errors import CheckpointError

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return name -> text, such as ``eos_token`` -> ``<|im_end|>``; nulls and a missing file are left out.

    Raises:
        CheckpointError: a token that is neither a string nor an object with its content.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    config = read_json(path)
    tokens = {}
    for name in _NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
        elif value is not None:
            raise CheckpointError(
                f"{path}: {name} must be a string or an object with 'content', got {value!r}"
            )
    return tokens
