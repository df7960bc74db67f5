"""Progress of long prefills, shown where a person watches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from lily_py.state import Progress

SHOW_FROM_SECONDS = 2.0
"""Prefills expected to take less show nothing."""


def watched() -> bool:
    """Tell whether a bar would be seen: on a terminal or in a notebook, and not with ``LILY_PROGRESS=0``."""
    if os.environ.get("LILY_PROGRESS", "") in ("0", "off", "false", "no"):
        return False
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr, or a closed one
        return False


class PrefillBar:
    """A callback for `State.advance` that draws a bar once it is clear that the prefill takes long."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Draw what is done, in tokens."""
        if self._bar is None:
            elapsed = time.perf_counter() - self._started
            if not done or elapsed * (total - done) / done < SHOW_FROM_SECONDS:
                return
            self._bar = tqdm(total=total, initial=done, unit="tok", desc="reading the prompt", leave=False)
        bar = self._bar
        bar.update(done - bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def prefill_progress(progress: bool | Progress | None) -> Progress | None:
    """Return the callback that an argument means: itself, a bar for True, None where nobody would see one."""
    if callable(progress):
        return progress
    return PrefillBar() if progress or (progress is None and watched()) else None


@contextmanager
def shown(progress: bool | Progress | None) -> Iterator[Progress | None]:
    """Give the callback that an argument means, as `prefill_progress`; a bar goes away at the end."""
    callback = prefill_progress(progress)
    try:
        yield callback
    finally:
        if isinstance(callback, PrefillBar):
            callback.close()
