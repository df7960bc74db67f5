"""The store of states: longest match, least recently used first out, shared memory counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily_py.prefix_index import PrefixIndex
from lily_py.prefix_store import PrefixStore


class FakePrefix:
    """A prefix that keeps given (address, bytes) alive."""

    def __init__(self, length: int, blocks: Iterable[tuple[int, int]]) -> None:
        self.length = length
        self._blocks = list(blocks)

    def blocks(self) -> list[tuple[int, int]]:
        return self._blocks


def tokens_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def add(store: PrefixStore, ids: list[int], blocks: Iterable[tuple[int, int]] = ()) -> Any:
    prefix: Any = FakePrefix(len(ids), blocks)
    store.add(tokens_of(*ids), prefix)
    return prefix


def test_the_longest_match_within_the_limit_is_found() -> None:
    store = PrefixStore(1 << 20)
    short, long = add(store, [1, 2]), add(store, [1, 2, 3, 4])
    add(store, [1, 9, 3])
    assert store.find(tokens_of(1, 2, 3, 4, 5), 5) is long
    assert store.find(tokens_of(1, 2, 3, 4, 5), 4) is long
    assert store.find(tokens_of(1, 2, 3, 4, 5), 3) is short
    assert store.find(tokens_of(1, 2, 3, 9), 4) is short
    assert store.find(tokens_of(2, 1), 2) is None
    assert store.find(tokens_of(1, 2), 0) is None


@settings(max_examples=200, deadline=None)
@given(
    stored=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    limit=st.integers(0, 8),
)
def test_it_finds_what_a_plain_search_finds(stored: list[list[int]], wanted: list[int], limit: int) -> None:
    store = PrefixStore(1 << 20)
    for ids in stored:
        add(store, ids)
    fitting = [ids for ids in stored if len(ids) <= limit and ids == wanted[: len(ids)]]
    found = store.find(tokens_of(*wanted), limit)
    assert (0 if found is None else found.length) == max(map(len, fitting), default=0)


def test_the_least_recently_used_leave_first() -> None:
    store = PrefixStore(350)
    for first in (1, 2, 3):
        add(store, [first], [(first, 100)])
    assert store.find(tokens_of(1), 1) is not None
    add(store, [4], [(4, 100)])
    assert [store.find(tokens_of(first), 1) is not None for first in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]
    assert store.nbytes <= 350


def test_shared_blocks_count_once_and_stay_until_the_last_user_left() -> None:
    store = PrefixStore(10_000)
    add(store, [1], [(1, 1000), (2, 10)])
    alone = store.nbytes
    add(store, [1, 2], [(1, 1000), (3, 10)])
    assert 10 <= store.nbytes - alone < 100
    store.trim(store.nbytes - 1)
    assert len(store) == 1
    assert 1010 <= store.nbytes < 1100
    store.clear()
    assert (store.nbytes, len(store), store.blocks()) == (0, 0, {})


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    store = PrefixStore(100)
    add(store, [1], [(1, 1000)])
    assert (len(store), store.nbytes) == (0, 0)


def test_a_store_without_budget_stores_nothing() -> None:
    store = PrefixStore(0)
    assert not store.enabled
    add(store, [1])
    assert len(store) == 0


def test_storing_again_replaces_nothing_but_counts_as_use() -> None:
    store = PrefixStore(350)
    first = add(store, [1], [(1, 100)])
    add(store, [2], [(2, 100)])
    add(store, [1], [(9, 100)])
    add(store, [3], [(3, 100)])
    add(store, [4], [(4, 100)])
    assert store.find(tokens_of(1), 1) is first
    assert store.find(tokens_of(2), 1) is None


def test_equal_hashes_of_different_tokens_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(self: PrefixIndex[Any], tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(tokens) + 1, np.uint64)

    monkeypatch.setattr(PrefixIndex, "_hash_beginnings", same)
    store = PrefixStore(1 << 20)
    add(store, [1, 2])
    assert store.find(tokens_of(3, 4), 2) is None
    other = add(store, [3, 4])
    assert store.find(tokens_of(3, 4), 2) is other
    assert store.find(tokens_of(1, 2), 2) is None


def test_a_thousand_prefixes_are_searched_in_well_under_a_millisecond() -> None:
    store = PrefixStore(1 << 40)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 17, 8000).astype(np.int32)
    for length in rng.choice(np.arange(1, 8000), 1000, replace=False):
        prefix: Any = FakePrefix(int(length), [(int(length), 1)])
        store.add(base, prefix)
    store.find(base, 7999)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        assert store.find(base, 7999) is not None
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5e-3
