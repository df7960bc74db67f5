"""Random programs over sessions: after every step, each equals a cold run bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import ids_of, load
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import lily_py


class SessionPrograms(RuleBasedStateMachine):
    """Sessions of one engine, forked and closed at will, beside requests that share its store of states.

    Args:
        engine: what keeps states.
        reference: the same model without a store: it computes all from nothing.
        saved: a file for sessions.
        limit: tokens of a session, to keep the cold runs short.
        tolerance: how far logits may be apart; 0 where all kernels give a row the same bits in any company.
    """

    def __init__(
        self, engine: lily_py.Engine, reference: lily_py.Engine, saved: Path, limit: int, tolerance: float
    ) -> None:
        super().__init__()
        self.engine, self.reference, self.saved = engine, reference, saved
        self.limit, self.tolerance = limit, tolerance
        self.sessions: list[tuple[lily_py.Session, list[int]]] = []
        self.touched: list[tuple[lily_py.Session, list[int]]] = []
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]

    @initialize()
    def begin(self) -> None:
        self.engine._runtime.store.clear()
        self.sessions = [(self.engine.new_session(), [])]

    def teardown(self) -> None:
        for session, _ in self.sessions:
            session.close()

    def pick(self, data: st.DataObject) -> tuple[lily_py.Session, list[int]]:
        self.touched = [data.draw(st.sampled_from(self.sessions))]
        return self.touched[0]

    @rule(data=st.data(), length=st.integers(1, 70), seed=st.integers(0, 3))
    def append(self, data: st.DataObject, length: int, seed: int) -> None:
        session, tokens = self.pick(data)
        if len(tokens) + length <= self.limit:
            ids = ids_of(length, seed=seed)
            session.append(ids)
            tokens += ids

    @rule(data=st.data(), count=st.integers(1, 12), seed=st.integers(0, 9), cancel=st.booleans())
    def generate(self, data: st.DataObject, count: int, seed: int, cancel: bool) -> None:
        session, tokens = self.pick(data)
        if not tokens or len(tokens) + count > self.limit:
            return
        stream = session.stream(max_tokens=count, seed=seed, temperature=seed % 2)
        if cancel:
            next(stream)
            stream.close()
        tokens += stream.finish().token_ids if not cancel else stream.result.token_ids

    @rule(data=st.data(), share=st.floats(0, 1))
    def rewind(self, data: st.DataObject, share: float) -> None:
        session, tokens = self.pick(data)
        to = round(share * len(tokens))
        session.rewind(to)
        del tokens[to:]

    @rule(data=st.data(), share=st.floats(0, 1), token=st.integers(0, 255))
    def edit(self, data: st.DataObject, share: float, token: int) -> None:
        session, tokens = self.pick(data)
        if not tokens:
            return
        place = min(round(share * len(tokens)), len(tokens) - 1)
        rest = tokens[place + 1 :]
        session.rewind(place)
        session.append([token, *rest])
        tokens[place] = token

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session, tokens = self.pick(data)
        self.sessions.append((session.fork(), list(tokens)))

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry[0].close()
        self.sessions.remove(entry)
        self.touched = []

    @rule(data=st.data(), elsewhere=st.booleans())
    def save_and_load(self, data: st.DataObject, elsewhere: bool) -> None:
        session, tokens = self.pick(data)
        session.save(self.saved)
        if elsewhere and len(self.sessions) < 4:
            self.touched = [(self.engine.load_session(self.saved), list(tokens))]
            self.sessions += self.touched
        else:
            session.load(self.saved)

    @rule(data=st.data(), suffix=st.integers(1, 20), seed=st.integers(0, 5))
    def request(self, data: st.DataObject, suffix: int, seed: int) -> None:
        _, tokens = self.pick(data)
        prompt = [*tokens[: self.limit // 2], *ids_of(suffix, seed=seed)]
        keywords: dict[str, Any] = {"max_tokens": 6, "seed": seed, "temperature": seed % 2}
        warm = self.engine.generate(prompt, **keywords)
        cold = self.reference.generate(prompt, **keywords)
        assert warm.token_ids == cold.token_ids
        assert cold.usage.cached_tokens == 0

    # Where it matters to a row's bits how prompts are cut, threads decide which token is drawn.
    @precondition(lambda self: self.tolerance == 0)
    @rule(count=st.integers(1, 8), seed=st.integers(0, 9), cancel=st.integers(0, 3))
    def all_at_once(self, count: int, seed: int, cancel: int) -> None:
        """Every session answers, and a request without one, each in a thread; one may be cancelled."""
        self.touched = [entry for entry in self.sessions if 0 < len(entry[1]) <= self.limit - count]
        keywords: dict[str, Any] = {"max_tokens": count, "seed": seed, "temperature": seed % 2}
        streams = [session.stream(**keywords) for session, _ in self.touched]
        prompt = ids_of(70, seed=seed)
        with ThreadPoolExecutor(len(streams) + 1) as pool:
            request = pool.submit(self.engine.generate, prompt, **keywords)
            answers = [pool.submit(stream.finish) for stream in streams]
            if cancel < len(streams):
                streams[cancel].cancel()
            for (_, tokens), answer in zip(self.touched, answers, strict=True):
                tokens += answer.result(60).token_ids
            assert request.result(60).token_ids == self.reference.generate(prompt, **keywords).token_ids

    @rule(
        change=st.sampled_from(["add", "answer anew", "edit", "drop"]),
        place=st.integers(0, 9),
        seed=st.integers(0, 9),
    )
    def converse(self, change: str, place: int, seed: int) -> None:
        """A conversation sent in full each time, as chat programs do, after whatever its user changed."""
        history = self.history
        if change == "answer anew" and history[-1]["role"] == "assistant":
            history.pop()
        elif change == "edit":
            history[place % len(history)]["content"] = "edited " * (1 + seed % 3)
        elif change == "drop" and len(history) > 2:
            del history[:2]
        if history[-1]["role"] == "assistant":
            history.append({"role": "user", "content": f"and {seed}?"})
        if len(history) > 8:
            del history[:4]
        keywords: dict[str, Any] = {"max_tokens": 6, "seed": seed, "temperature": seed % 2, "top_logprobs": 1}
        warm = self.engine.chat(history, **keywords)
        cold = self.reference.chat(history, **keywords)
        assert warm.token_ids == cold.token_ids
        for mine, other in zip(warm.logprobs, cold.logprobs, strict=True):
            assert [each.token_id for each in mine.top] == [each.token_id for each in other.top]
            numbers = ([each.logprob for each in (token, *token.top)] for token in (mine, other))
            self.agree(*numbers)
        history.append(warm.message)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        store = self.engine._runtime.store
        store.trim(round(share * store.nbytes))

    @invariant()
    def equals_a_cold_run(self) -> None:
        for session, tokens in self.touched:
            assert session.tokens == tokens
            if tokens:
                self.agree(session.logits(), self.reference.prefill(tokens))
        self.touched = []

    def agree(self, warm: Any, cold: Any) -> None:
        np.testing.assert_allclose(warm, cold, rtol=0, atol=self.tolerance)


def run_programs(
    engine: lily_py.Engine,
    reference: lily_py.Engine,
    saved: Path,
    *,
    programs: int = 60,
    steps: int = 40,
    limit: int = 260,
    tolerance: float = 0.0,
) -> None:
    """Random programs, the same each time; `SessionPrograms` says what the arguments are."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: SessionPrograms(engine, reference, saved, limit, tolerance),
        settings=settings(
            max_examples=programs,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("shape", "kv_dtype", "speculation"),
    [
        ("moe_tied", "bfloat16", None),
        ("gdn_ratio3", "bfloat16", None),
        ("moe_tied", "int8", None),
        ("moe_tied", "bfloat16", "prompt_lookup"),
    ],
)
def test_random_programs_equal_cold_runs(
    tiny: Any, shape: str, kv_dtype: str, speculation: str | None, tmp_path: Path
) -> None:
    folder: Path = tiny(shape, "mlx-4bit-g64")
    options = {"kv_dtype": kv_dtype}
    with (
        load(folder, snapshot_interval=24, speculation=speculation, **options) as engine,
        load(folder, cache_bytes=0, **options) as cold,
    ):
        run_programs(engine, cold, tmp_path / "session")
