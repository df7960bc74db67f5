"""Several answers to one prompt, decoded as one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lily_py.errors import MemoryBudgetError
from lily_py.results import Result
from lily_py.stream import Stream

MOST_TOGETHER = 16
"""More in one batch gain little on a CPU, and each takes the memory of a conversation."""


class Answers:
    """Answers to make in one thread; `cancel` may come from any other, at any time.

    Args:
        openers: each opens the stream of one answer. The first one computes the prompt, the others start from
            its snapshot.
    """

    def __init__(self, openers: Sequence[Callable[[], Stream]]) -> None:
        self._openers = openers
        self._streams: list[Stream] = []
        self._cancelled = False

    def run(self) -> list[Result]:
        """Return all answers, decoded together as far as memory allows.

        Raises:
            MemoryBudgetError: not even one fits.
            Exception: whatever one of them raised; all have ended then.
        """
        results: list[Result] = []
        while len(results) < len(self._openers):
            try:
                self._begin(self._openers[len(results) :][:MOST_TOGETHER])
                streams = self._streams
                results += [streams[0].finish()] if len(streams) == 1 else Stream.finish_together(streams)
            except BaseException:
                for stream in self._streams:
                    stream.close()
                raise
        return results

    def cancel(self) -> None:
        """End all of them early; returns at once."""
        self._cancelled = True
        for stream in list(self._streams):
            stream.cancel()

    def _begin(self, openers: Sequence[Callable[[], Stream]]) -> None:
        """Open as many as memory allows, at least one, and let each say its first token."""
        self._streams = []
        for opener in openers:
            try:
                stream = opener()
            except MemoryBudgetError:
                if not self._streams:
                    raise
                return
            self._streams.append(stream)
            if self._cancelled:
                stream.cancel()
            next(stream, None)
