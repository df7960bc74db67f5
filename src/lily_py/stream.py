"""A running generation as an iterator of chunks, with a handle to stop it from anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NoReturn

from lily_py.errors import InvalidArgumentError, LilyError
from lily_py.generation import Generation
from lily_py.results import Chunk, Result
from lily_py.workers import Workers


class Stream(Iterator[Chunk]):
    """Iterates over the chunks of an answer while it is generated; also a context manager.

    Work is done in the thread that iterates. `cancel` may be called from any other, and acts within one step,
    or one chunk of the prompt. Leaving the ``with`` block, `close`, an exception and dropping the stream all
    end the generation.

    Args:
        generation: what is iterated.
        check: called before each step; raises if the engine can't be used.
        on_end: called once when the generation has ended, however it did.
    """

    def __init__(self, generation: Generation, check: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._generation: Generation | None = generation
        """Until the end: its state's memory goes with it, however long the stream is kept."""
        self._check = check
        self._on_end: Callable[[], None] | None = on_end
        self._lock = threading.RLock()
        self._stepping = False
        self._result: Result | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._advance(None)
        if chunk is None:
            raise StopIteration
        return chunk

    def _advance(self, drawn: int | None) -> Chunk | None:
        """Return the next chunk, None after the last; its token is `drawn`, unless None."""
        with self._lock:
            generation = self._generation
            if generation is None:
                return None
            self._stepping = True
            try:
                self._check()
                chunk = generation.advance(drawn)
            except BaseException:
                # Ctrl-C among others: the answer so far is the result, and the engine goes on.
                self._settle()
                raise
            finally:
                self._stepping = False
            if chunk is None or chunk.finish_reason is not None:
                self._settle()
            return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A stream that was never made fully has nothing to end.
        if getattr(self, "_result", True) is None:
            self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a Stream can't be pickled or copied: it is one generation that is running"
        )

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"Stream({state})"

    def cancel(self) -> None:
        """Ask the generation to stop; returns at once. The next chunk is the last one."""
        generation = self._generation
        if generation is not None:
            generation.cancel.cancel()

    def close(self) -> None:
        """Stop the generation and wait until it has stopped; again and again if you like."""
        self.cancel()
        with self._lock:
            # Called from within a step (a progress callback, a logits processor), that step ends it itself.
            if self._result is None and not self._stepping:
                self._settle()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, or was cut off."""
        return self._result is not None

    @property
    def result(self) -> Result:
        """The answer, once the stream has ended.

        Raises:
            LilyError: it hasn't; iterate to the end, or close it.
        """
        if self._result is None:
            raise LilyError("the stream hasn't ended yet: iterate to its end or close it for a result")
        return self._result

    def finish(self) -> Result:
        """Run to the end and return the answer."""
        for _ in self:
            pass
        return self.result

    @staticmethod
    def finish_together(streams: Sequence[Stream]) -> list[Result]:
        """Run streams of one engine to their ends, decoding as one batch in this thread; return the answers.

        If one of them fails, all end, and its error is raised.
        """
        try:
            while running := [stream for stream in streams if not stream.ended]:
                with ExitStack() as locks:
                    for stream in running:
                        locks.enter_context(stream._lock)
                    generations = [stream._generation for stream in running if stream._generation is not None]
                    drawn = dict(zip(generations, Generation.draw_each(generations), strict=True))
                    for stream in running:
                        if stream._generation is not None:
                            stream._advance(drawn[stream._generation])
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return [stream.result for stream in streams]

    def _settle(self) -> None:
        generation, on_end = self._generation, self._on_end
        assert generation is not None
        assert on_end is not None
        generation.stop()
        self._result = generation.result()
        self._generation = self._on_end = None
        on_end()


class AsyncStream(AsyncIterator[Chunk]):
    """A stream for ``async for`` and ``async with``; each step runs in a worker thread.

    A cancelled task ends the generation.

    Args:
        open_stream: makes the stream; called in a worker thread when the first chunk is asked for.
        workers: the threads.
    """

    def __init__(self, open_stream: Callable[[], Stream], workers: Workers) -> None:
        self._open = open_stream
        self._workers = workers
        self._stream: Stream | None = None
        self._cancelled = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        try:
            chunk = await self._workers.run(self._next)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """Ask the generation to stop; returns at once."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def aclose(self) -> None:
        """Stop the generation and wait until it has stopped."""
        self.cancel()
        if self._stream is not None:
            await self._workers.run(self._stream.close)

    @property
    def result(self) -> Result:
        """The answer, once the stream has ended; errors as in `Stream.result`."""
        if self._stream is None:
            raise LilyError("the stream hasn't begun yet: iterate to its end for a result")
        return self._stream.result

    async def finish(self) -> Result:
        """Run to the end and return the answer."""
        async for _ in self:
            pass
        return self.result

    def _next(self) -> Chunk | None:
        return next(self._opened(), None)

    def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = self._open()
            if self._cancelled:
                self._stream.cancel()
        return self._stream
