"""The tokens of one conversation, and the native state that covers a beginning of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy
from numpy.typing import NDArray

from lily_py import _core
from lily_py.prefix_store import PrefixStore

Logits = NDArray[numpy.float32]
Bytes = NDArray[numpy.uint8]
Progress = Callable[[int, int], None]


class State:
    """Tokens, and how far the model has computed them. One user at a time.

    `tokens` is what the conversation holds; the native sequence covers a beginning of it, `covered` tokens
    long. `advance` computes the rest. Whatever goes wrong on the way, the sequence covers a beginning of
    `tokens`: that is the invariant everything else relies on.

    Snapshots go to the prefix store as soon as they are taken; here only the last one is kept, and lent to
    others.

    Args:
        model: what computes.
        store: where snapshots go and restarts are looked for.
        interval: a snapshot every so many tokens; 0 for none.
    """

    def __init__(self, model: _core.Model, store: PrefixStore, interval: int) -> None:
        self.tokens: list[int] = []
        self._model = model
        self._store = store
        self._interval = interval if store.enabled else 0
        self._native: _core.Sequence | None = None
        self._logits: Logits | None = None
        self._joined: _core.Sequence | None = None
        self._held: tuple[NDArray[numpy.int32], _core.Prefix] | None = None
        store.lend(self)

    @property
    def snapshot_held(self) -> tuple[NDArray[numpy.int32], _core.Prefix] | None:
        """The last snapshot and its tokens, whatever has been computed since."""
        return self._held

    @property
    def covered(self) -> int:
        """Tokens that have been computed."""
        return 0 if self._native is None else self._native.length

    def blocks(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the native memory that this keeps alive."""
        held = [] if self._held is None else self._held[1].blocks()
        return held if self._native is None else [*self._native.blocks(), *held]

    def restart(self, tokens: Sequence[int]) -> int:
        """Hold `tokens` instead; return how many of them are covered by what was computed before.

        The covered part leaves out at least the last token, whose logits have to be computed; unless the
        tokens are what is held already, and its logits are known.
        """
        if self._logits is not None and self.covered == len(tokens) and self.tokens == list(tokens):
            return self.covered
        ids = numpy.array(tokens, numpy.int32)
        limit = max(0, len(tokens) - 1)
        # The state as it stands may be the best one to go on from.
        own = _common(numpy.array(self.tokens[: self.covered], numpy.int32), ids)
        if own and (own < self.covered or own > limit):
            own = max(length for length in self._sequence.snapshots() if length <= min(own, limit))
        stored = self._store.find(ids, limit)
        if stored is not None and stored.length > own:
            self._native = self._model.new_sequence(stored)
            self._logits = None
            self._held = (ids[: stored.length].copy(), stored)
        elif own < self.covered:
            self._sequence.truncate(own)
            self._logits = None
            # A snapshot that was given up isn't kept alive for others.
            self._held = (ids[:own].copy(), self._sequence.prefix(own)) if own else None
        self.tokens = list(tokens)
        return self.covered

    def restore(self, tokens: Sequence[int]) -> None:
        """Hold `tokens` again after something failed; nothing happens if they are what is held."""
        if self.tokens != tokens:
            self.restart(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens; nothing is computed yet."""
        self.tokens.extend(tokens)

    def rewind(self, length: int) -> None:
        """Hold the first `length` tokens only; `advance` computes what no snapshot covers."""
        if length == len(self.tokens):
            return
        if self.covered <= length:
            del self.tokens[length:]
        else:
            self.restart(self.tokens[:length])

    def advance(
        self,
        cancel: _core.CancelToken | None = None,
        progress: Progress | None = None,
        marks: Iterable[int] = (),
    ) -> Logits | None:
        """Compute all tokens that aren't yet; return the logits [vocab] after the last one.

        Args:
            cancel: stops within an operation; then None is returned.
            progress: called with (tokens done, tokens to do) after each chunk.
            marks: lengths at which a snapshot is taken on the way.
        """
        total = len(self.tokens)
        if self._logits is not None and self.covered == total:
            return self._logits
        if self.covered == total:
            self.restart(self.tokens)
        self._logits = None
        first = self.covered
        wanted = {mark for mark in marks if first < mark < total} if self._store.enabled else set()
        if self._interval:
            wanted |= set(range((first // self._interval + 1) * self._interval, total, self._interval))
        logits: Logits | None = None
        for stop in sorted({*wanted, total}):
            begin = self.covered

            def report(done: int, _: int, offset: int = begin - first) -> None:
                # Called even if nobody listens: it is here that a Ctrl-C comes through.
                if progress is not None:
                    progress(offset + done, total - first)

            ids = numpy.array(self.tokens[begin:stop], numpy.int32)
            try:
                logits = self._model.forward(self._sequence, ids, cancel=cancel, progress=report)
            except BaseException:
                self._recover()
                raise
            if logits is None:
                return None
            if stop in wanted:
                self.snapshot()
        self._logits = logits
        return logits

    def step(self, sampler: _core.Sampler, drafts: Sequence[int] = ()) -> int:
        """Compute the last token, the only one that isn't yet; return the next, drawn but not added.

        Args:
            sampler: draws.
            drafts: tokens that may follow, computed in the same pass. Steps after which they are the last
                token compute nothing; they are no part of the state before.
        """
        self._logits = None
        try:
            token = self._model.step(self._sequence, self.tokens[-1], sampler, drafts)
        except BaseException:
            self._recover()
            raise
        self._snapshot_at_interval()
        return token

    def step_logits(self, drafts: Sequence[int] = ()) -> Logits:
        """Do what `step` does, but return the logits [vocab] to draw from."""
        self._logits = None
        try:
            logits = self._model.step_logits(self._sequence, self.tokens[-1], drafts)
        except BaseException:
            self._recover()
            raise
        self._snapshot_at_interval()
        return logits

    @property
    def alone(self) -> bool:
        """Whether no other state of the model is between `join` and `leave`."""
        return self._model.joined <= (0 if self._joined is None else 1)

    @staticmethod
    def step_each(states: Sequence[State], samplers: Sequence[_core.Sampler]) -> list[int]:
        """Do what `step` does for several states in one pass; if it fails, it fails for all."""
        for state in states:
            state._logits = None
        try:
            tokens = states[0]._model.step_each(
                [state._sequence for state in states], [state.tokens[-1] for state in states], samplers
            )
        except BaseException:
            for state in states:
                state._recover()
            raise
        for state in states:
            state._snapshot_at_interval()
        return tokens

    def join(self) -> None:
        """Say that steps will follow one another, so that others' steps are computed together with them."""
        self._joined = self._sequence
        self._model.join(self._joined)

    def leave(self) -> None:
        """Say that no more steps follow; nothing happens without `join`."""
        if self._joined is not None:
            self._model.leave(self._joined)
            self._joined = None

    def snapshot(self) -> None:
        """Store the state as it is, for others and for coming back."""
        length = self.covered
        if not self._store.enabled or length == 0:
            return
        self._sequence.snapshot()
        for older in self._sequence.snapshots():
            if 0 < older < length:
                self._sequence.drop_snapshot(older)
        self._held = (numpy.array(self.tokens[:length], numpy.int32), self._sequence.prefix(length))
        self._store.add(*self._held)

    def export(self) -> tuple[_core.Prefix | None, list[tuple[int, Bytes]], Logits | None]:
        """Return what there is to save: the computed part, snapshots (length, bytes) in it, known logits.

        The bytes are views; they stay as they are whatever this state does next.
        """
        length = self.covered
        if length == 0:
            return None, [], None
        known = self._sequence.snapshots()
        self._sequence.snapshot()
        prefix = self._sequence.prefix(length)
        earlier = [(at, self._sequence.prefix(at).recurrent()) for at in known if 0 < at < length]
        if length not in known:
            self._sequence.drop_snapshot(length)
        return prefix, earlier, self._logits

    def adopt(self, tokens: Sequence[int], native: _core.Sequence | None, logits: Logits | None) -> None:
        """Hold what was saved: tokens, the sequence that covers a beginning of them, known logits."""
        self.tokens, self._native, self._logits = list(tokens), native, logits
        self._held = None

    def fork(self) -> State:
        """Return a second state with the same past."""
        other = State.__new__(State)
        other.tokens = list(self.tokens)
        other._model, other._store, other._interval = self._model, self._store, self._interval
        other._native = None if self._native is None else self._native.fork()
        other._logits = self._logits
        other._joined = None
        other._held = self._held
        self._store.lend(other)
        return other

    @property
    def _sequence(self) -> _core.Sequence:
        # Made when first needed: a large model's takes tens of megabytes, and a stored state often serves.
        if self._native is None:
            self._native = self._model.new_sequence()
        return self._native

    def _snapshot_at_interval(self) -> None:
        if self._interval and len(self.tokens) % self._interval == 0:
            self.snapshot()

    def _recover(self) -> None:
        """Bring the sequence back to a beginning of `tokens` after a step that failed half-way."""
        self._logits = None
        self._sequence.truncate(self._sequence.length)


def _common(a: NDArray[numpy.int32], b: NDArray[numpy.int32]) -> int:
    """Return the length of the common beginning."""
    size = min(len(a), len(b))
    different = numpy.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
