"""Ending an answer at a stop string, none of which is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

from lily_py.errors import InvalidArgumentError


def partial_suffix(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class StopStrings:
    """Watches a stream of text for the first stop string to be completed.

    What `feed` and `finish` return, joined, is the text before the match, however the stream was cut into
    pieces. Of stop strings completed by the same character the longest counts.

    Args:
        stops: one string, several or None.

    Raises:
        InvalidArgumentError: an empty string or something else than strings.
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        listed = [stops] if isinstance(stops, str) else stops if stops is not None else []
        if not isinstance(listed, Sequence) or not all(isinstance(stop, str) for stop in listed):
            raise InvalidArgumentError(f"stop must be a string or a list of strings, got {stops!r}")
        if "" in listed:
            raise InvalidArgumentError(
                "stop holds an empty string, which would end every answer before it begins"
            )
        self._stops = tuple(dict.fromkeys(listed))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met, or None so far."""

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown. After a match everything is swallowed."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        found = [
            (start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return pending[:start]
        # A match can still begin only where the end of the text is a beginning of a stop string.
        keep = max((partial_suffix(pending, stop) for stop in self._stops), default=0)
        shown = len(pending) - keep
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """End the stream; return what was held back in vain."""
        held, self._held = self._held, ""
        return held
