"""Stored states to start from: the longest beginning of a prompt that was computed before.

Each entry is an immutable native prefix. Entries share pages of keys and values; what is counted against the
budget is what they keep alive together. With a `DiskStore` behind it, entries outlive the process. Beyond the
budget, whoever keeps a state alive anyway lends its last snapshot.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy

from lily_py import _core
from lily_py.living import Living
from lily_py.prefix_index import PrefixIndex, Tokens

if TYPE_CHECKING:
    from lily_py.disk_store import DiskStore

_TOKEN_BYTES = 8
"""Of an entry's own, for each token: one copy here, one in the native prefix."""


@dataclass(frozen=True)
class _Entry:
    prefix: _core.Prefix
    blocks: list[tuple[int, int]]


class Lender(Protocol):
    """What keeps a state alive."""

    @property
    def snapshot_held(self) -> tuple[Tokens, _core.Prefix] | None:
        """Its last snapshot, from which others may go on, with the tokens it covers."""


class PrefixStore:
    """Native prefixes by their tokens, least recently used ones leaving first. Any thread may call.

    Args:
        budget: bytes to hold at most; 0 stores nothing.
    """

    def __init__(self, budget: int) -> None:
        self.enabled = budget > 0
        """Whether anything is ever stored."""
        self.budget = budget
        """Bytes to hold at most; may change."""
        self._index: PrefixIndex[_Entry] = PrefixIndex()
        self._lenders: Living[Lender] = Living()
        self._references: dict[int, int] = {}
        self._nbytes = 0
        self._lock = threading.RLock()
        self._disk: DiskStore | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries keep alive, each shared block counted once."""
        return self._nbytes

    def keep_on(self, disk: DiskStore) -> None:
        """Write what is added from now on to a store on disk too, and look there for what isn't here."""
        self._disk = disk
        disk.start(self.exact)

    def lend(self, lender: Lender) -> None:
        """Look for states in `lender` too, as long as it lives."""
        if self.enabled:
            self._lenders.add(lender)

    def find(self, tokens: Tokens, limit: int) -> _core.Prefix | None:
        """Return the longest prefix of `tokens` with at most `limit` tokens; if stored, it counts as used."""
        with self._lock:
            found = self._index.find(tokens, limit)
        lent = self._find_lent(tokens, limit, 0 if found is None else len(found[0]))
        if self._disk is not None:
            own = lent.length if lent is not None else 0 if found is None else len(found[0])
            loaded = self._disk.find(tokens, limit, own)
            if loaded is not None:
                self.add(tokens, loaded)
                return loaded
            if found is not None:
                self._disk.use(found[0])
        if lent is not None:
            return lent
        return None if found is None else found[1].prefix

    def _find_lent(self, tokens: Tokens, limit: int, beyond: int) -> _core.Prefix | None:
        """Return the longest lent prefix of `tokens` with more than `beyond` and at most `limit` tokens."""
        best: _core.Prefix | None = None
        for lender in self._lenders:
            held = lender.snapshot_held
            if held is None or not beyond < (length := len(held[0])) <= limit:
                continue
            # Most differ in their last token already.
            if held[0][-1] == tokens[length - 1] and numpy.array_equal(held[0], tokens[:length]):
                best, beyond = held[1], length
        return best

    def exact(self, tokens: Tokens) -> _core.Prefix | None:
        """Return the prefix of exactly these tokens, if it is held in memory."""
        with self._lock:
            entry = self._index.get(tokens, use=False)
            return None if entry is None else entry.prefix

    def add(self, tokens: Tokens, prefix: _core.Prefix) -> None:
        """Store a prefix of `tokens`; what was used least recently leaves if the budget asks for it."""
        if not self.enabled:
            return
        own = tokens[: prefix.length].copy()
        with self._lock:
            if self._index.get(own) is None:
                entry = _Entry(prefix, prefix.blocks())
                replaced = self._index.put(own, entry)
                if replaced is not None:
                    self._forget(*replaced)
                self._nbytes += _TOKEN_BYTES * len(own)
                for address, nbytes in entry.blocks:
                    users = self._references.get(address, 0)
                    self._references[address] = users + 1
                    self._nbytes += 0 if users else nbytes
                self.trim(self.budget)
        if self._disk is not None:
            self._disk.add(own)

    def trim(self, budget: int) -> None:
        """Let the least recently used entries go until at most `budget` bytes are held."""
        with self._lock:
            while len(self._index) and self._nbytes > budget:
                self._forget(*self._index.pop_oldest())

    def clear(self) -> None:
        """Let all entries go; what is on disk stays there."""
        self.trim(-1)

    def close(self) -> None:
        """Finish what is being written to disk, and let all entries go."""
        if self._disk is not None:
            self._disk.close()
        self.clear()

    def blocks(self) -> dict[int, int]:
        """Return address -> bytes of all native memory that entries keep alive."""
        with self._lock:
            return {address: nbytes for _, entry in self._index for address, nbytes in entry.blocks}

    def _forget(self, tokens: Tokens, entry: _Entry) -> None:
        self._nbytes -= _TOKEN_BYTES * len(tokens)
        for address, nbytes in entry.blocks:
            users = self._references[address] - 1
            if users:
                self._references[address] = users
            else:
                del self._references[address]
                self._nbytes -= nbytes
