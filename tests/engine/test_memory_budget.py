"""`memory_limit`: admitted only if it fits, with a message that says what would; stored states give way."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
from engine_support import END, ids_of, load

import lily_py
from lily_py.memory import format_size, parse_size

NO_END: dict[str, Any] = {"logit_bias": {END: -1e4, END - 2: -1e4}}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1000, 1000), ("1000", 1000), ("1k", 1000), ("24GB", 24 * 10**9), ("24 GB", 24 * 10**9),
        ("1.5MiB", 3 << 19), ("2gib", 2 << 30), ("0", 0), (1.5e9, 1_500_000_000),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: Any, nbytes: int) -> None:
    assert parse_size("size", text) == nbytes


@pytest.mark.parametrize("wrong", ["", "GB", "1 parsec", "-1", "1e3", None, [], float("inf")])
def test_other_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="size must be"):
        parse_size("size", wrong)


def test_sizes_are_written_readably() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "7.0 TiB",
    ]  # fmt: skip


@pytest.fixture
def limit(folder: Path) -> int:
    """Bytes that leave room for about 600 tokens."""
    with load(folder) as engine:
        info = engine.info()
    return info.weights + 600 * info.kv_per_token + 2 * info.recurrent_state


def test_a_limit_below_the_weights_refuses_to_load(folder: Path) -> None:
    with pytest.raises(
        lily_py.MemoryBudgetError, match=r"memory_limit of 100\.0 KiB is too small: the weights"
    ):
        load(folder, memory_limit=100 << 10)


def test_what_does_not_fit_is_refused_and_what_would_fit_is_said(folder: Path, limit: int) -> None:
    with load(folder, memory_limit=limit) as engine:
        with pytest.raises(lily_py.MemoryBudgetError) as error:
            engine.generate(ids_of(700), max_tokens=10)
        assert isinstance(error.value, MemoryError)
        fits = int(re.search(r"(\d+) tokens would fit", str(error.value))[1])  # type: ignore[index]
        assert 500 <= fits <= 600
        result = engine.generate(ids_of(fits - 10), max_tokens=10, **NO_END)
        assert result.usage.completion_tokens == 10
        with pytest.raises(lily_py.MemoryBudgetError):
            engine.generate(ids_of(fits - 9), max_tokens=10 + 64)
        with pytest.raises(lily_py.MemoryBudgetError):
            engine.prefill(ids_of(700))


def test_the_default_length_shrinks_to_what_fits(folder: Path, limit: int) -> None:
    with load(folder, memory_limit=limit) as engine:
        result = engine.generate(ids_of(300), **NO_END)
        assert result.finish_reason == "length"
        assert 200 <= result.usage.completion_tokens <= 300


def test_stored_states_give_way_to_work(folder: Path, limit: int) -> None:
    with load(folder, memory_limit=limit, cache_bytes="1GB") as engine:
        for seed in range(6):
            engine.generate(ids_of(250, seed=seed), max_tokens=10, **NO_END)
            assert engine.info().in_use <= limit
        assert engine.generate(ids_of(500), max_tokens=10, **NO_END).usage.completion_tokens == 10
        assert engine.info().in_use <= limit


def test_live_sessions_count_and_closing_them_frees(folder: Path, limit: int) -> None:
    with load(folder, memory_limit=limit) as engine:
        session = engine.new_session()
        session.append(ids_of(400))
        with pytest.raises(lily_py.MemoryBudgetError, match="close sessions"):
            engine.generate(ids_of(300), max_tokens=10)
        session.append(ids_of(50))
        session.close()
        assert engine.generate(ids_of(300), max_tokens=10, **NO_END).usage.completion_tokens == 10


def test_b30_running_answers_count(folder: Path, limit: int) -> None:
    with load(folder, memory_limit=limit) as engine:
        stream = engine.stream(ids_of(300), max_tokens=100, **NO_END)
        next(stream)
        with pytest.raises(lily_py.MemoryBudgetError):
            engine.generate(ids_of(300), max_tokens=100)
        stream.close()
        engine.generate(ids_of(300), max_tokens=100)
        dropped = engine.stream(ids_of(300), max_tokens=100)
        del dropped
        gc.collect()
        engine.generate(ids_of(300), max_tokens=100)


def test_the_cache_budget_holds(folder: Path) -> None:
    with load(folder, cache_bytes="1MiB", snapshot_interval=16) as engine:
        for seed in range(10):
            engine.generate(ids_of(200, seed=seed), max_tokens=10, **NO_END)
            assert engine.info().cache_used <= 1 << 20
        assert len(engine._runtime.store) > 2
