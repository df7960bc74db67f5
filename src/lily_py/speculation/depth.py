"""How many tokens to draft: as many as the time of their rows is worth."""

from __future__ import annotations

from dataclasses import dataclass

ROW_COST = 0.36
"""Time of each further row of a pass, relative to a pass of one: 8 rows take 3.5 times as long
(docs/performance.md)."""

_EXPECTED = 0.7
"""Chance of a draft that nothing is known of."""
_WEIGHT = 2.0
"""How many observed drafts that expectation counts as."""
_KEPT = 0.9
"""Share that an observation keeps when the next one comes."""
_KEPT_UNUSED = 0.99
"""And when a draft wasn't tried: what failed is tried again after some tens of tokens."""


@dataclass
class _Record:
    accepted: float = 0.0
    tried: float = 0.0

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.tried *= kept

    @property
    def chance(self) -> float:
        return (self.accepted + _EXPECTED * _WEIGHT) / (self.tried + _WEIGHT)


class DraftDepth:
    """Learns, while one answer is generated, how often drafts are right: for each length of match."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def choose(self, match: int, most: int) -> int:
        """Return how many drafts make the most tokens a second, 0 to `most`.

        With a chance a of each draft after those before it, d drafts make 1 + a + ... + a^d tokens in the
        time of 1 + ROW_COST d single ones.
        """
        record = self._records.setdefault(match, _Record())
        best, depth = 1.0, 0
        tokens, power, chance = 1.0, 1.0, record.chance
        for d in range(1, most + 1):
            power *= chance
            tokens += power
            rate = tokens / (1 + ROW_COST * d)
            if rate > best:
                best, depth = rate, d
        if depth == 0:
            record.fade(_KEPT_UNUSED)
        return depth

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn that of so many drafts the first `accepted` were right."""
        record = self._records.setdefault(match, _Record())
        record.fade(_KEPT)
        record.accepted += accepted
        record.tried += min(accepted + 1, drafted)
