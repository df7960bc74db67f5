"""Structured output: answers that follow a JSON schema, a regular expression or a grammar, by `llguidance`.

At each step the library says which tokens may come next, as a bit mask over the vocabulary; the sampler draws
among those. An end token is among them exactly when what was said so far is complete.
"""

from __future__ import annotations

import importlib
import json
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from lily_py.errors import InvalidArgumentError, LilyError
from lily_py.text import Tokenizer

CONSTRAINT_NAMES = ("response_format", "regex", "grammar")

Words = NDArray[numpy.uint32]
"""A bit mask: bit i % 32 of word i / 32 allows token i."""

_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x09]{0,40}"}
"""Bounded, so that a model can't fill its answer with white space; indented documents fit."""

_REASONS = {"NoExtensionBias": "no answer follows it"}
"""What terse ones mean."""

_tokenizers: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Constraint:
    """What an answer must follow.

    Attributes:
        name: the keyword that asked for it.
        grammar: in the library's own form.
    """

    name: str
    grammar: str


def read_constraint(values: Mapping[str, Any]) -> Constraint | None:
    """Check the keywords of `CONSTRAINT_NAMES`, of which one may be given; ``{"type": "text"}`` is none.

    Raises:
        InvalidArgumentError: names the keyword, its value and what is allowed.
        LilyError: the library isn't installed; says how to.
    """
    given = [name for name in CONSTRAINT_NAMES if values.get(name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(f"{' and '.join(given)} can't be combined: give one of them")
    if not given:
        return None
    name, value = given[0], values[given[0]]
    if name != "response_format":
        if not isinstance(value, str) or not value:
            raise InvalidArgumentError(f"{name} must be a text, not empty, got {value!r}")
        matcher = _library().LLMatcher
        convert = matcher.grammar_from_regex if name == "regex" else matcher.grammar_from_lark
        try:
            return Constraint(name, convert(value))
        except ValueError as error:
            raise InvalidArgumentError(f"{name}: {error}") from error
    schema = _schema(value)
    if schema is None:
        return None
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"response_format: the schema must be JSON ({error})") from error
    try:
        return Constraint(name, _library().LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS))
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: {error}") from error


class Matcher:
    """Follows one answer through its constraint.

    Args:
        constraint: what the answer must follow.
        tokenizer: of the checkpoint.

    Raises:
        InvalidArgumentError: the schema, expression or grammar is invalid; says where.
    """

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        library = _library()
        with _lock:
            native = _tokenizers.get(tokenizer)
            if native is None:
                ends = list(tokenizer.eos_token_ids) or None
                native = _tokenizers[tokenizer] = library.LLTokenizer(tokenizer.description, eos_token=ends)
        self._name = constraint.name
        self._matcher = library.LLMatcher(native, constraint.grammar, log_level=0)
        self._words: Words = numpy.zeros((native.vocab_size + 31) // 32, numpy.uint32)
        self._ends = [token for token in tokenizer.eos_token_ids if token < native.vocab_size]
        self._check()

    def allowed(self, *, may_end: bool) -> Words:
        """Return the tokens that may come next; the array is used again by the next call.

        Args:
            may_end: allow end tokens where the answer is complete. Without it they come only if nothing
                else may.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        for token in self._ends:
            self._words[token // 32] &= ~numpy.uint32(1 << token % 32)
        if self._matcher.is_accepting() and (may_end or not self._words.any()):
            for token in self._ends:
                self._words[token // 32] |= numpy.uint32(1 << token % 32)
        return self._words

    def accept(self, token: int) -> None:
        """Take the token that was drawn."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            # Behind the reason follows the state of the library's parser.
            reason = self._matcher.get_error().partition("\n<state>")[0].strip()
            raise InvalidArgumentError(f"{self._name}: {_REASONS.get(reason, reason)}")


def _schema(value: Any) -> Any:
    """Return the schema of a `response_format`, or None if any text will do."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return inner["schema"]
    if isinstance(inner, Mapping) and inner.get("schema") is True:  # JSON Schema's way to say anything
        return {}
    raise InvalidArgumentError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
        f"'json_schema': {{'name': ..., 'schema': {{...}}}}}}, got {value!r}"
    )


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise LilyError(
            "structured output needs the package llguidance: pip install 'lily-py[grammar]'"
        ) from None
