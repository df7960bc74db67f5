"""Typed reading of JSON files and of their fields: every surprise is an error that names file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lily_py.errors import CheckpointError, CheckpointNotFoundError

MAX_JSON_BYTES = 256 * 1024 * 1024
"""No configuration, index or tokenizer file comes near; a bigger one isn't JSON that we want to hold."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it isn't readable, not UTF-8, not JSON or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes, which no such file should be")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: isn't valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """The fields of one JSON object; getters check type and range.

    A field that is absent or null takes the default; without a default that is an error.

    Args:
        values: the object.
        where: what to call it in errors, such as ``/models/x/config.json: text_config``.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, key: str, expected: str) -> CheckpointError:
        """Build the error for `key`, whose value is not what was `expected`."""
        value = repr(self.values.get(key))
        shown = value if len(value) <= 80 else value[:77] + "..."
        return CheckpointError(f"{self.where}: {key} must be {expected}, got {shown}")

    def has(self, key: str) -> bool:
        """Tell whether `key` is there and not null."""
        return self.values.get(key) is not None

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where}: {key} is missing")
        return default

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer within [low, high]."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number within [low, high], which NaN never is."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def mapping(self, key: str) -> Fields:
        """Return an object's fields; absent is an empty object."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return integers within [low, high], from a list, a single one, or nothing."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self.error(key, f"an integer or a list of integers from {low} to {high}")
        return tuple(items)
