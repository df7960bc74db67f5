"""What a command leaves behind."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]


class Input(io.StringIO):
    """Standard input, which may pretend to be a terminal."""

    def __init__(self, text: str, terminal: bool = False) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal
