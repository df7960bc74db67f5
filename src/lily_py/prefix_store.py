"""Stored states to start from: the longest beginning of a prompt that was computed before.

Each entry is an immutable native prefix. Entries share pages of keys and values; what is counted against the
budget is what they keep alive together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from lily_py import _core

Tokens = NDArray[numpy.int32]

_BASE = numpy.uint64(0x9E3779B97F4A7C15)
_TOKEN_BYTES = 8
"""Of an entry's own, for each token: one copy here, one in the native prefix."""


@dataclass(frozen=True)
class _Entry:
    tokens: Tokens
    prefix: _core.Prefix
    blocks: list[tuple[int, int]]


class PrefixStore:
    """Native prefixes by their tokens, least recently used ones leaving first. Any thread may call.

    Found by polynomial hashes of all beginnings of the prompt, computed in one pass, and then compared token
    by token: a collision costs a miss, never a wrong state.

    Args:
        budget: bytes to hold at most; 0 stores nothing.
    """

    def __init__(self, budget: int) -> None:
        self.enabled = budget > 0
        """Whether anything is ever stored."""
        self.budget = budget
        """Bytes to hold at most; may change."""
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._references: dict[int, int] = {}
        self._nbytes = 0
        self._lengths: NDArray[numpy.int64] | None = None
        self._hashes: NDArray[numpy.uint64] = numpy.zeros(0, numpy.uint64)
        self._powers = numpy.ones(1, numpy.uint64)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries keep alive, each shared block counted once."""
        return self._nbytes

    def find(self, tokens: Tokens, limit: int) -> _core.Prefix | None:
        """Return the longest stored prefix of `tokens` with at most `limit` tokens; it counts as used."""
        with self._lock:
            if not self._entries or limit < 1:
                return None
            if self._lengths is None:
                keys = list(self._entries)
                self._lengths = numpy.array([length for length, _ in keys], numpy.int64)
                self._hashes = numpy.array([key for _, key in keys], numpy.uint64)
            hashes = self._hash_beginnings(tokens[:limit])
            reach = numpy.minimum(self._lengths, len(hashes) - 1)
            matching = (self._lengths == reach) & (hashes[reach] == self._hashes)
            for length in sorted(self._lengths[matching].tolist(), reverse=True):
                key = (length, int(hashes[length]))
                entry = self._entries[key]
                if numpy.array_equal(entry.tokens, tokens[:length]):
                    self._entries.move_to_end(key)
                    return entry.prefix
            return None

    def add(self, tokens: Tokens, prefix: _core.Prefix) -> None:
        """Store a prefix of `tokens`; what was used least recently leaves if the budget asks for it."""
        if not self.enabled:
            return
        own = tokens[: prefix.length].copy()
        with self._lock:
            key = (prefix.length, int(self._hash_beginnings(own)[-1]))
            known = self._entries.get(key)
            if known is not None and numpy.array_equal(known.tokens, own):
                self._entries.move_to_end(key)
                return
            if known is not None:
                self._remove(key)
            entry = _Entry(own, prefix, prefix.blocks())
            self._entries[key] = entry
            self._lengths = None
            self._nbytes += _TOKEN_BYTES * len(own)
            for address, nbytes in entry.blocks:
                users = self._references.get(address, 0)
                self._references[address] = users + 1
                self._nbytes += 0 if users else nbytes
            self.trim(self.budget)

    def trim(self, budget: int) -> None:
        """Let the least recently used entries go until at most `budget` bytes are held."""
        with self._lock:
            while self._entries and self._nbytes > budget:
                self._remove(next(iter(self._entries)))

    def clear(self) -> None:
        """Let all entries go."""
        self.trim(-1)

    def blocks(self) -> dict[int, int]:
        """Return address -> bytes of all native memory that entries keep alive."""
        with self._lock:
            return {address: nbytes for entry in self._entries.values() for address, nbytes in entry.blocks}

    def _remove(self, key: tuple[int, int]) -> None:
        entry = self._entries.pop(key)
        self._lengths = None
        self._nbytes -= _TOKEN_BYTES * len(entry.tokens)
        for address, nbytes in entry.blocks:
            users = self._references[address] - 1
            if users:
                self._references[address] = users
            else:
                del self._references[address]
                self._nbytes -= nbytes

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
