"""The names of Metal's library that kernels may use.

The check shim declares what the authors believe the library has. This list is narrower: each name was seen
in kernels that Apple's compiler accepts, so that a name which only the shim knows doesn't pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .lexer import TokenStream

_LIST = Path(__file__).with_name("vocabulary.txt")


def names() -> frozenset[str]:
    """Known names, without `metal::`."""
    lines = (line.split("#")[0].strip() for line in _LIST.read_text().splitlines())
    return frozenset(name for line in lines for name in line.split())


def _used(stream: TokenStream, library: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Positions and names of library names: qualified by metal::, or called and not a member."""
    for i, token in enumerate(stream.tokens):
        if token.kind != "identifier":
            continue
        before = stream.significant(i, -1)
        if stream.text(before) == "::":
            scope = stream.text(stream.significant(before, -1))
            if scope in ("metal", "fast", "precise"):
                yield i, token.text
        elif (
            token.text in library
            and stream.text(before) not in (".", "->")
            and stream.text(stream.significant(i)) in ("(", "<")
        ):
            yield i, token.text


def unknown_names(text: str, library: frozenset[str]) -> list[str]:
    """Messages for the names in preprocessed `text` that are of the library but not on the list."""
    stream, known = TokenStream(text), names() | {"metal", "fast", "precise"}
    messages = {}
    for i, name in _used(stream, library):
        if name not in known and not re.fullmatch(r"(metalsim|METALSIM)_\w+", name):
            where = stream.where(i)
            messages[name] = f"{where}: error: '{name}' is not on the list of known Metal library names"
    return list(messages.values())
