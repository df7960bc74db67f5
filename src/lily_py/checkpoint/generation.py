"""A checkpoint's advice on sampling: `generation_config.json`, or its copy in `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lily_py.checkpoint.fields import Fields, read_json

_MAX_INTEGER = (1 << 31) - 1


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation defaults of a folder; nulls are left out, unknown keys are kept as they are.

    Args:
        folder: where ``generation_config.json`` may lie.
        config: the folder's `config.json`, whose ``generation_config`` counts if there is no such file.

    Raises:
        CheckpointError: a known key has a wrong type or an impossible value.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        fields = Fields(read_json(path), str(path))
    else:
        fields = Fields(config, str(folder / "config.json")).mapping("generation_config")
    known: dict[str, Callable[[str], Any]] = {
        "temperature": lambda key: fields.number(key, 0.0, 1e6),
        "top_p": lambda key: fields.number(key, 0.0, 1.0),
        "min_p": lambda key: fields.number(key, 0.0, 1.0),
        "top_k": lambda key: fields.integer(key, 0, _MAX_INTEGER),
        "repetition_penalty": lambda key: fields.number(key, 1e-6, 1e6),
        "presence_penalty": lambda key: fields.number(key, -1e6, 1e6),
        "frequency_penalty": lambda key: fields.number(key, -1e6, 1e6),
        "max_new_tokens": lambda key: fields.integer(key, 1, _MAX_INTEGER),
        "max_length": lambda key: fields.integer(key, 1, _MAX_INTEGER),
        "do_sample": lambda key: fields.boolean(key),
        "eos_token_id": lambda key: list(fields.integers(key, 0, _MAX_INTEGER)),
        "bos_token_id": lambda key: list(fields.integers(key, 0, _MAX_INTEGER)),
        "pad_token_id": lambda key: list(fields.integers(key, 0, _MAX_INTEGER)),
    }
    return {
        key: known[key](key) if key in known else value
        for key, value in fields.values.items()
        if value is not None
    }
