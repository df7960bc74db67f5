"""Requests at the same time: each gets what it gets alone, and nobody waits for, ends or breaks another."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Keywords, ids_of, load, outcome, requests, together

import lily_py

Numbers = np.ndarray


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[lily_py.Engine]:
    """An engine that stores no states: each request computes all of its prompt."""
    with load(folder, cache_bytes=0) as engine:
        yield engine


def test_each_request_gets_what_it_gets_alone(plain: lily_py.Engine) -> None:
    asked = requests(12, seed=1)
    alone = [outcome(plain.generate(prompt, **keywords)) for prompt, keywords in asked]
    met = together([lambda p=p, k=k: outcome(plain.generate(p, **k)) for p, k in asked])
    assert met == alone


def test_b26_rows_of_unequal_length_equal_their_solo_runs(plain: lily_py.Engine) -> None:
    """3 and 300 tokens in one batch; one row ends early, another joins when the first is half-way."""
    asked: list[tuple[list[int], int]] = [(ids_of(3), 40), (ids_of(300, seed=1), 7), (ids_of(65, seed=2), 20)]

    def opened(number: int) -> lily_py.Stream:
        prompt, length = asked[number]
        keywords: Keywords = {"max_tokens": length, "min_tokens": length, "seed": number, "top_logprobs": 3}
        return plain.stream(prompt, **keywords)

    alone = [outcome(opened(number).finish()) for number in range(3)]
    before = plain._runtime.model.passes
    first, second = opened(0), opened(1)
    for _ in range(15):
        next(first)
    late = opened(2)
    results = lily_py.Stream.finish_together([first, second, late])
    assert [outcome(result) for result in results] == alone
    # The prompts, in pieces of 64 and more; 14 tokens of the first one alone; then passes that all share.
    assert plain._runtime.model.passes - before <= (1 + 5 + 2) + 14 + 25


def test_hundreds_of_requests_joining_leaving_and_cancelled(folder: Path) -> None:
    """Workers take requests as they become free; every fifth one is cancelled in the middle."""
    engine = load(folder, memory_limit="200MB", cache_bytes="20MB")
    room = engine._runtime.budget.fitting()
    kinds = requests(40, seed=2)
    alone = [engine.generate(prompt, **keywords) for prompt, keywords in kinds]
    order = list(range(40)) * 6
    random.Random(3).shuffle(order)

    def ask(number: int, kind: int) -> None:
        prompt, keywords = kinds[kind]
        with engine.stream(prompt, **keywords) as stream:
            for count, _ in enumerate(stream, 1):
                if number % 5 == 0 and count == 3:
                    stream.cancel()
        result, expected = stream.result, alone[kind]
        if result.finish_reason == "cancelled":
            assert number % 5 == 0
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            assert outcome(result) == outcome(expected)

    with ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(ask, number, kind) for number, kind in enumerate(order)]:
            each.result(30)
    assert engine._runtime.budget.fitting() == room
    engine.close()


def test_choices_share_each_pass(plain: lily_py.Engine) -> None:
    model = plain._runtime.model
    before = model.passes
    plain.generate(ids_of(4), n=6, max_tokens=60, min_tokens=60)
    # One for each prompt, the rest together.
    assert model.passes - before == 6 + 59


def test_decoders_go_on_during_a_long_prompt(plain: lily_py.Engine) -> None:
    length = min(6000, plain.info().context - 8)
    read = threading.Event()
    begun = threading.Event()
    seen: list[int] = []

    def watch(done: int, total: int) -> None:
        begun.set()

    def long_one() -> tuple[Any, ...]:
        result = plain.generate(ids_of(length), max_tokens=4, temperature=0, progress=watch)
        read.set()
        return outcome(result)

    def decoder(i: int) -> tuple[Any, ...]:
        count = 0
        with plain.stream(ids_of(5, seed=i), max_tokens=200, min_tokens=200, seed=i) as stream:
            for _ in stream:
                count += begun.is_set() and not read.is_set()
        seen.append(count)
        return outcome(stream.result)

    alone = [
        outcome(plain.generate(ids_of(5, seed=i), max_tokens=200, min_tokens=200, seed=i)) for i in range(3)
    ]
    alone.append(outcome(plain.generate(ids_of(length), max_tokens=4, temperature=0)))
    before = plain._runtime.model.passes
    assert together([*[lambda i=i: decoder(i) for i in range(3)], long_one]) == alone
    assert min(seen) > 10
    # They went on in passes that read a piece of the prompt as well.
    assert plain._runtime.model.passes - before < 3 * 200 + length / 64


def test_an_error_of_one_reaches_no_other(plain: lily_py.Engine) -> None:
    def broken(tokens: list[int], logits: Numbers) -> Numbers:
        if len(tokens) > 12:
            raise ZeroDivisionError("a processor's own")
        return logits

    def not_numbers(tokens: list[int], logits: Numbers) -> Numbers:
        return logits * np.float32("nan") if len(tokens) > 12 else logits

    keywords: Keywords = {"max_tokens": 30, "min_tokens": 30, "seed": 5}
    alone = [outcome(plain.generate(ids_of(10, seed=i), **keywords)) for i in range(2)]
    met = together(
        [
            *[lambda i=i: outcome(plain.generate(ids_of(10, seed=i), **keywords)) for i in range(2)],
            lambda: plain.generate(ids_of(10), logits_processors=[broken], **keywords),
            lambda: plain.generate(ids_of(10), logits_processors=[not_numbers], **keywords),
            lambda: plain.generate(
                ids_of(10), logit_bias={i: float("-inf") for i in range(plain.info().vocabulary)}
            ),
        ]
    )
    assert met[:2] == alone
    assert isinstance(met[2], ZeroDivisionError)
    assert isinstance(met[3], lily_py.BackendError)
    assert isinstance(met[4], lily_py.InvalidArgumentError)


def test_closing_the_engine_ends_all_and_hangs_none(folder: Path) -> None:
    engine = load(folder)
    started = threading.Barrier(5)

    def run(i: int) -> object:
        first = True
        for _ in engine.stream(ids_of(20, seed=i), max_tokens=3000, min_tokens=3000):
            if first:
                started.wait(10)
            first = False
        return "ended"

    def close() -> object:
        started.wait(10)
        engine.close()
        return "closed"

    met = together([*[lambda i=i: run(i) for i in range(4)], close])
    assert met[4] == "closed"
    assert all(each == "ended" or isinstance(each, lily_py.EngineClosedError) for each in met[:4])


def test_ctrl_c_in_one_thread_leaves_the_others_running(plain: lily_py.Engine) -> None:
    """The main thread is interrupted at any point of its work, also while it leads the others' steps."""
    keywords: Keywords = {"max_tokens": 150, "min_tokens": 150, "seed": 3}
    alone = [outcome(plain.generate(ids_of(9, seed=i), **keywords)) for i in range(3)]
    for delay in (0.01, 0.03, 0.05):
        with ThreadPoolExecutor(3) as pool:
            others = [
                pool.submit(lambda i=i: outcome(plain.generate(ids_of(9, seed=i), **keywords)))
                for i in range(3)
            ]
            timer = threading.Timer(delay, signal.raise_signal, (signal.SIGINT,))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                plain.generate(ids_of(12), max_tokens=4000, min_tokens=4000)
            assert [each.result(30) for each in others] == alone


def test_streams_that_take_turns_in_one_thread_wait_for_nothing(plain: lily_py.Engine) -> None:
    keywords: Keywords = {"max_tokens": 120, "min_tokens": 120, "temperature": 0}

    def alternate() -> list[tuple[Any, ...]]:
        streams = [plain.stream(ids_of(6, seed=i), **keywords) for i in range(2)]
        while not all(stream.ended for stream in streams):
            for stream in streams:
                next(stream, None)
        return [outcome(stream.result) for stream in streams]

    start = time.perf_counter()
    alone = [outcome(plain.generate(ids_of(6, seed=i), **keywords)) for i in range(2)]
    middle = time.perf_counter()
    assert alternate() == alone
    assert time.perf_counter() - middle < 3 * (middle - start) + 0.1


def test_async_requests_get_what_they_get_alone(plain: lily_py.Engine) -> None:
    asked = requests(8, seed=4)
    alone = [outcome(plain.generate(prompt, **keywords)) for prompt, keywords in asked]

    async def read(prompt: list[int], keywords: Keywords) -> tuple[Any, ...]:
        stream = plain.astream(prompt, **keywords)
        async for _ in stream:
            pass
        return outcome(stream.result)

    async def run() -> tuple[list[Any], list[Any]]:
        streamed = await asyncio.gather(*[read(prompt, keywords) for prompt, keywords in asked])
        whole = await asyncio.gather(*[plain.agenerate(prompt, **keywords) for prompt, keywords in asked])
        return streamed, [outcome(result) for result in whole]

    assert asyncio.run(run()) == (alone, alone)


@pytest.mark.parametrize("cache", [0, "64MB"])
def test_choices_decode_as_one_batch_and_equal_single_ones(folder: Path, cache: int | str) -> None:
    keywords: Keywords = {"temperature": 1, "max_tokens": 25, "stop": "a", "top_logprobs": 1}
    with load(folder, cache_bytes=cache) as engine:
        result = engine.generate(ids_of(30), n=20, seed=7, **keywords)
        alone = [outcome(engine.generate(ids_of(30), seed=7 + i, **keywords)) for i in range(20)]
        assert [outcome(each) for each in result.choices] == alone


def test_a_choice_that_fails_ends_the_others(engine: lily_py.Engine) -> None:
    calls = 0

    def broken(_: list[int], logits: Numbers) -> Numbers:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise ZeroDivisionError
        return logits

    with pytest.raises(ZeroDivisionError):
        engine.generate(ids_of(8), n=3, max_tokens=40, min_tokens=40, logits_processors=[broken])
    assert calls == 10


def test_choices_that_do_not_fit_together_are_made_in_turn(folder: Path) -> None:
    with load(folder) as engine:
        sizes = engine.info()
        one = sizes.kv_per_token * 256 + 2 * sizes.recurrent_state
    with load(folder, memory_limit=sizes.weights + 2 * one, cache_bytes=0) as engine:
        result = engine.generate(ids_of(20), n=5, seed=1, max_tokens=100, min_tokens=100)
    assert [len(each.token_ids) for each in result.choices] == [100] * 5
