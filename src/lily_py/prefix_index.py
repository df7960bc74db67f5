"""Things found by the tokens that they cover: the longest one that a prompt begins with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy
from numpy.typing import NDArray

Tokens = NDArray[numpy.int32]
Key = tuple[int, int]
"""(tokens covered, hash of them)."""

T = TypeVar("T")

_BASE = numpy.uint64(0x9E3779B97F4A7C15)


class PrefixIndex(Generic[T]):
    """Values by tokens, in the order of their last use. Not for several threads at once.

    Found by polynomial hashes of all beginnings of the prompt, computed in one pass, and then compared token
    by token: a collision costs a miss, never a wrong value.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, tuple[Tokens, T]] = OrderedDict()
        self._lengths: NDArray[numpy.int64] | None = None
        self._hashes: NDArray[numpy.uint64] = numpy.zeros(0, numpy.uint64)
        self._powers = numpy.ones(1, numpy.uint64)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Tokens, T]]:
        return iter(list(self._entries.values()))

    def find(self, tokens: Tokens, limit: int, beyond: int = 0) -> tuple[Tokens, T] | None:
        """Return the longest entry that `tokens` begins with; it counts as used.

        Args:
            tokens: the prompt.
            limit: most tokens of the entry.
            beyond: it must have more tokens than this.
        """
        if not self._entries or limit <= beyond:
            return None
        lengths, stored = self._lengths, self._hashes
        if lengths is None:
            keys = list(self._entries)
            lengths = numpy.array([length for length, _ in keys], numpy.int64)
            stored = numpy.array([key for _, key in keys], numpy.uint64)
            self._lengths, self._hashes = lengths, stored
        hashes = self._hash_beginnings(tokens[:limit])
        reach = numpy.minimum(lengths, len(hashes) - 1)
        matching = (lengths == reach) & (hashes[reach] == stored) & (lengths > beyond)
        for length in sorted(lengths[matching].tolist(), reverse=True):
            key = (length, int(hashes[length]))
            # Gone if the garbage collector has just ended a stream, whose last state took the place.
            entry = self._entries.get(key)
            if entry is not None and numpy.array_equal(entry[0], tokens[:length]):
                self._entries.move_to_end(key)
                return entry
        return None

    def get(self, tokens: Tokens, *, use: bool = True) -> T | None:
        """Return the value of exactly these tokens, or None; it counts as used, unless `use` is False."""
        key = self._key(tokens)
        entry = self._entries.get(key)
        if entry is None or not numpy.array_equal(entry[0], tokens):
            return None
        if use:
            self._entries.move_to_end(key)
        return entry[1]

    def put(self, tokens: Tokens, value: T) -> tuple[Tokens, T] | None:
        """Add a value; return the entry that had its place, one of an equal hash, if there was one."""
        key = self._key(tokens)
        replaced = self._entries.pop(key, None)
        self._entries[key] = (tokens, value)
        self._lengths = None
        return replaced

    def pop(self, tokens: Tokens) -> None:
        """Remove the entry of exactly these tokens, if there is one."""
        if self.get(tokens, use=False) is not None:
            del self._entries[self._key(tokens)]
            self._lengths = None

    def pop_oldest(self) -> tuple[Tokens, T]:
        """Remove and return the entry whose last use is longest ago."""
        self._lengths = None
        return self._entries.popitem(last=False)[1]

    def _key(self, tokens: Tokens) -> Key:
        return len(tokens), int(self._hash_beginnings(tokens)[-1])

    def _hash_beginnings(self, tokens: Tokens) -> NDArray[numpy.uint64]:
        """Return the hashes of all beginnings, from length 0 on: sums of (token + 1) * base**position."""
        if len(self._powers) < len(tokens):
            count = max(len(tokens), 2 * len(self._powers))
            factors = numpy.full(count, _BASE, numpy.uint64)
            factors[0] = 1
            self._powers = numpy.cumprod(factors, dtype=numpy.uint64)
        hashes = numpy.zeros(len(tokens) + 1, numpy.uint64)
        terms = (tokens.astype(numpy.uint64) + numpy.uint64(1)) * self._powers[: len(tokens)]
        numpy.cumsum(terms, out=hashes[1:])
        return hashes
