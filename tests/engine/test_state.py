"""`State`: whatever it is made to hold, computing the rest gives the logits of a computation from nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_support import ids_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily_py import _core
from lily_py.checkpoint import open_checkpoint
from lily_py.loader import load_model
from lily_py.prefix_store import PrefixStore
from lily_py.state import State


@pytest.fixture(scope="module")
def model(folder: Path) -> _core.Model:
    return load_model(open_checkpoint(folder), threads=1)


def cold(model: _core.Model, tokens: list[int]) -> np.ndarray:
    logits = model.forward(model.new_sequence(), np.array(tokens, np.int32))
    assert logits is not None
    return logits


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_restart_and_rewind_equals_a_computation_from_nothing(
    model: _core.Model, data: st.DataObject
) -> None:
    store = PrefixStore(data.draw(st.sampled_from([0, 200_000, 1 << 24]), "budget"))
    state = State(model, store, data.draw(st.sampled_from([0, 8, 64]), "interval"))
    for _ in range(data.draw(st.integers(2, 6), "rounds")):
        # Token lists over two values part and meet at all places.
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=40), "tokens")
        covered = state.restart(tokens)
        assert state.covered == covered <= len(tokens)
        marks = data.draw(st.lists(st.integers(0, 45), max_size=3), "marks")
        np.testing.assert_array_equal(state.advance(marks=marks), cold(model, tokens))
        if data.draw(st.booleans(), "snapshot"):
            state.snapshot()
        length = data.draw(st.integers(1, len(tokens)), "length")
        state.rewind(length)
        assert state.tokens == tokens[:length]
        if data.draw(st.booleans(), "look"):
            np.testing.assert_array_equal(state.advance(), cold(model, tokens[:length]))


def test_a_step_that_fails_leaves_a_beginning_covered(model: _core.Model) -> None:
    state = State(model, PrefixStore(1 << 24), 0)
    ids = ids_of(50)
    state.restart(ids)

    def fail(done: int, total: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        state.advance(progress=fail, marks=[20])
    assert state.tokens == ids
    assert 0 < state.covered < 50
    np.testing.assert_array_equal(state.advance(), cold(model, ids))


def test_an_exact_restart_keeps_what_is_known(model: _core.Model) -> None:
    state = State(model, PrefixStore(0), 0)
    state.restart(ids_of(30))
    logits = state.advance()
    assert state.restart(ids_of(30)) == 30
    assert state.advance() is logits


def test_progress_counts_what_is_computed_only(model: _core.Model) -> None:
    state = State(model, PrefixStore(1 << 24), 0)
    state.restart(ids_of(40))
    state.advance()
    seen: list[tuple[int, int]] = []
    state.extend(ids_of(30, seed=1))
    state.advance(progress=lambda done, total: seen.append((done, total)), marks=[50])
    assert seen == [(10, 30), (30, 30)]
