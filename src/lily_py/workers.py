"""Threads for the asynchronous twins: one for each call that is running."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MOST_THREADS = 512
"""More calls at once wait for their turn."""


class Workers:
    """An engine's own threads, made as they are needed.

    Those of the event loop are few, a handful on a small machine, and belong to everybody: whole answers in
    all of them would keep a stream from its next token.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run something that takes its time in a thread, in the caller's context."""
        call = functools.partial(contextvars.copy_context().run, work)
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="lily")
            running = self._executor.submit(call)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Let the threads end as soon as they have nothing to do; more work makes new ones."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
