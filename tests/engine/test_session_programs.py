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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lily_py

LIMIT = 260
"""Tokens of a session, to keep the cold runs short."""


class SessionPrograms(RuleBasedStateMachine):
    """Sessions of one engine, forked and closed at will, beside requests that share its store of states."""

    engine: lily_py.Engine
    reference: lily_py.Engine
    saved: Path

    def __init__(self) -> None:
        super().__init__()
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
        if len(tokens) + length <= LIMIT:
            ids = ids_of(length, seed=seed)
            session.append(ids)
            tokens += ids

    @rule(data=st.data(), count=st.integers(1, 12), seed=st.integers(0, 9), cancel=st.booleans())
    def generate(self, data: st.DataObject, count: int, seed: int, cancel: bool) -> None:
        session, tokens = self.pick(data)
        if not tokens or len(tokens) + count > LIMIT:
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
        prompt = [*tokens[: LIMIT // 2], *ids_of(suffix, seed=seed)]
        keywords: dict[str, Any] = {"max_tokens": 6, "seed": seed, "temperature": seed % 2}
        warm = self.engine.generate(prompt, **keywords)
        cold = self.reference.generate(prompt, **keywords)
        assert warm.token_ids == cold.token_ids
        assert cold.usage.cached_tokens == 0

    @rule(count=st.integers(1, 8), seed=st.integers(0, 9), cancel=st.integers(0, 3))
    def all_at_once(self, count: int, seed: int, cancel: int) -> None:
        """Every session answers, and a request without one, each in a thread; one may be cancelled."""
        self.touched = [entry for entry in self.sessions if 0 < len(entry[1]) <= LIMIT - count]
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
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
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
                np.testing.assert_array_equal(session.logits(), self.reference.prefill(tokens))
        self.touched = []


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
        SessionPrograms.engine, SessionPrograms.reference = engine, cold
        SessionPrograms.saved = tmp_path / "session"
        machine = SessionPrograms.TestCase
        machine.settings = settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        machine().runTest()
