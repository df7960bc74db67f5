"""How much memory there is, was used, and is allowed."""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterable

from lily_py.errors import InvalidArgumentError, MemoryBudgetError
from lily_py.prefix_store import PrefixStore

PAGE_TOKENS = 64
"""Keys and values come in pages of so many tokens."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(name: str, value: int | float | str) -> int:
    """Return bytes of a number or a text such as ``"24GB"`` or ``"512MiB"``.

    Raises:
        InvalidArgumentError: names the argument and its value.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = match[2].lower() if match else ""
        if match is None or unit not in _UNITS:
            raise InvalidArgumentError(f"{name} must be a size such as '24GB' or '512MiB', got {value!r}")
        return int(float(match[1]) * _UNITS[unit])
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidArgumentError(
            f"{name} must be a number of bytes or a size such as '24GB', got {value!r}"
        )
    return int(value)


def format_size(nbytes: float) -> str:
    """Return bytes in a readable unit, as ``1.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def physical_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> int:
    """Return the most bytes that this process ever held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MemoryBudget:
    """Admits work only if it will fit.

    Args:
        limit: bytes allowed in all; None for no limit.
        name: of the limit, for messages.
        fixed: bytes of the weights, and of a GPU's buffers.
        token_bytes: of keys and values, for each token.
        state_bytes: of one recurrent state.
        held: gives (address, bytes) of the native memory of live sessions.
        store: gives way to admitted work.
    """

    def __init__(
        self,
        limit: int | None,
        *,
        name: str = "memory_limit",
        fixed: int,
        token_bytes: int,
        state_bytes: int,
        held: Callable[[], Iterable[tuple[int, int]]],
        store: PrefixStore,
    ) -> None:
        self.limit = limit
        self._name = name
        self._fixed = fixed
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._held = held
        self._store = store
        self._store_budget = store.budget
        self._reserved = 0
        self._lock = threading.RLock()
        if limit is not None and self.conversation(1) > limit - fixed:
            raise MemoryBudgetError(
                f"{name} of {format_size(limit)} is too small: the weights take {format_size(fixed)} "
                f"and a conversation at least {format_size(self.conversation(1))}"
            )

    def conversation(self, tokens: int) -> int:
        """Return the bytes that a conversation needs to reach a number of tokens.

        Counted are keys and values in whole pages and two recurrent states: the present one and a snapshot.

        """
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS * self._token_bytes + 2 * self._state_bytes

    @property
    def in_use(self) -> int:
        """Bytes of weights, live sessions and stored states, what they share counted once."""
        return self._fixed + sum({**dict(self._held()), **self._store.blocks()}.values())

    def fitting(self) -> int | None:
        """Return how many tokens a conversation could reach, stored states given up; None for no limit."""
        if self.limit is None or not self._token_bytes:
            return None
        with self._lock:
            return self._fitting(self._room())

    def admit(self, tokens: int) -> int:
        """Reserve memory for a conversation; return the bytes, to be given to `release`.

        Args:
            tokens: at its end.

        Raises:
            MemoryBudgetError: says what is needed, what is allowed, and what would fit.
        """
        if self.limit is None:
            return 0
        need = self.conversation(tokens)
        with self._lock:
            room = self._room()
            if need > room:
                raise MemoryBudgetError(
                    f"{tokens} tokens of context need {format_size(need)}, but of {self._name} "
                    f"{format_size(self.limit)} only {format_size(max(0, room))} are free beside the weights "
                    f"({format_size(self._fixed)}) and live conversations; {self._fitting(room)} "
                    "tokens would fit: shorten the prompt, lower max_tokens, close sessions or raise "
                    "memory_limit"
                )
            self._reserved += need
            self._give_way(room - need)
        return need

    def release(self, nbytes: int) -> None:
        """Give back what `admit` reserved."""
        if nbytes:
            with self._lock:
                self._reserved -= nbytes
                self._give_way(self._room())

    def _give_way(self, room: int) -> None:
        self._store.budget = max(0, min(self._store_budget, room))
        self._store.trim(self._store.budget)

    def _fitting(self, room: int) -> int:
        if not self._token_bytes:
            return 0
        pages = (room - self.conversation(0)) // (PAGE_TOKENS * self._token_bytes)
        return max(0, int(pages)) * PAGE_TOKENS

    def _room(self) -> int:
        assert self.limit is not None
        return self.limit - self._fixed - self._reserved - sum(dict(self._held()).values())
