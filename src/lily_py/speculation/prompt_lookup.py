"""Drafts without a model: what followed the last tokens where they stood before (prompt lookup, n-grams)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

SHORTEST_MATCH = 2
LONGEST_MATCH = 8


class PromptLookup:
    """Looks through the conversation's own tokens, prompt and answer. For one conversation that grows."""

    def __init__(self) -> None:
        self._ids = numpy.zeros(1024, numpy.int32)
        self._size = 0

    def draft(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Return (`count` tokens that may follow, length of the match they come from).

        Of the places where the longest end of `tokens` stood before, up to `LONGEST_MATCH` tokens of it, the
        last one counts; where it reaches into the end itself, the text is taken to go round. Without a match
        of `SHORTEST_MATCH` tokens there are no drafts.

        Args:
            tokens: those of the last call, and more.
            count: at least one.
        """
        ids = self._grown(tokens)
        last = len(ids) - 1
        places = numpy.flatnonzero(ids[:last] == ids[last])
        length = 0
        while len(places):
            length, found = length + 1, places
            if length == LONGEST_MATCH:
                break
            places = places[places >= length]
            places = places[ids[places - length] == ids[last - length]]
        if length < SHORTEST_MATCH:
            return [], 0
        drafts: list[int] = numpy.resize(ids[found[-1] + 1 :][:count], count).tolist()
        return drafts, length

    def _grown(self, tokens: Sequence[int]) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]:
        """Return the tokens as an array; those since the last call are added to it."""
        size = len(tokens)
        if size > len(self._ids):
            self._ids = numpy.resize(self._ids, 2 * size)
        self._ids[self._size : size] = tokens[self._size :]
        self._size = size
        return self._ids[:size]
