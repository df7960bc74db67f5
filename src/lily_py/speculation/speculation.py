"""What one answer speculates: drafts before a pass, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lily_py.speculation.depth import DraftDepth


class Drafter(Protocol):
    """Proposes tokens."""

    def draft(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Return (at most `count` tokens that may follow, their class: one is right about as often)."""


class Speculation:
    """Follows one answer: `drafts` before each step, `drawn` after each token.

    Args:
        drafter: proposes.
        depth: chooses how many.
        most: drafts in a pass.

    Attributes:
        drafted: tokens proposed so far and computed in passes.
        accepted: those of them that the model drew itself.
    """

    def __init__(self, drafter: Drafter, depth: DraftDepth, most: int) -> None:
        self.drafted = 0
        self.accepted = 0
        self._drafter = drafter
        self._depth = depth
        self._most = most
        self._ahead: deque[int] = deque()
        self._count = self._kind = 0
        self._computed = False

    def drafts(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return what to compute with the last of `tokens`; nothing if that is computed already.

        Args:
            tokens: of the conversation.
            most: drafts that are of use.
        """
        if self._computed:
            self._computed = False
            return []
        most = min(most, self._most)
        if most < 1:
            return []
        drafts, self._kind = self._drafter.draft(tokens, most)
        if drafts:
            drafts = drafts[: self._depth.choose(self._kind, len(drafts))]
        self._ahead = deque(drafts)
        self._count = len(drafts)
        self.drafted += len(drafts)
        return drafts

    def drawn(self, token: int) -> None:
        """Take the next token of the answer into account."""
        if not self._ahead:
            return
        if token == self._ahead[0]:
            self._ahead.popleft()
            self.accepted += 1
            self._computed = True
            if self._ahead:
                return
            accepted = self._count
        else:
            accepted = self._count - len(self._ahead)
            self._ahead.clear()
        self._depth.observe(self._kind, self._count, accepted)
