"""Progress of long prompts: shown where a person watches, silent elsewhere."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

import lily_py
from lily_py import progress
from lily_py.progress import PrefillBar, prefill_progress, watched


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr (set in the test itself: pytest sets its own between fixtures and test)."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("LILY_PROGRESS", raising=False)
    return stream


def test_a_bar_is_for_terminals_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_of(monkeypatch)
    assert watched()
    assert isinstance(prefill_progress(None), PrefillBar)
    monkeypatch.setenv("LILY_PROGRESS", "0")
    assert not watched()
    assert prefill_progress(None) is None
    assert isinstance(prefill_progress(True), PrefillBar)
    monkeypatch.delenv("LILY_PROGRESS")
    assert prefill_progress(False) is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not watched()


def test_a_function_is_called_as_it_is() -> None:
    def own(done: int, total: int) -> None: ...

    assert prefill_progress(own) is own


def test_a_notebook_counts_as_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delenv("LILY_PROGRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", object())  # type: ignore[arg-type]
    assert watched()


def test_only_what_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    now = [0.0]
    clock: Any = type("Clock", (), {"perf_counter": staticmethod(lambda: now[0])})
    monkeypatch.setattr(progress, "time", clock)
    short = PrefillBar()
    now[0] = 0.1
    short(512, 2048)  # 0.3 seconds to go
    assert terminal.getvalue() == ""
    long = PrefillBar()
    now[0] = 1.1
    long(512, 4096)  # 7 seconds to go
    assert "reading the prompt" in terminal.getvalue()
    assert "512/4096" in terminal.getvalue()
    long(4096, 4096)
    assert long._bar is None
    long.close()


def test_every_call_that_reads_a_prompt_takes_a_function_and_draws_a_bar(
    engine: lily_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(progress, "SHOW_FROM_SECONDS", 0.0)
    with engine.new_session() as session:
        calls: dict[str, Any] = {
            "prefill": lambda **keywords: engine.prefill([1] * 1100, **keywords),
            "append": lambda **keywords: session.append([2] * 1100, **keywords),
            "generate": lambda **keywords: engine.generate([3] * 1100, max_tokens=1, **keywords),
            "session": lambda **keywords: session.generate([4] * 1100, max_tokens=1, **keywords),
        }
        for name, call in calls.items():
            engine._runtime.store.clear()
            seen: list[tuple[int, int]] = []
            call(progress=lambda done, total, seen=seen: seen.append((done, total)))
            assert seen[-1][0] == seen[-1][1] >= 1100, name
            assert terminal.getvalue() == "", name
        engine.prefill([1] * 1100)
        assert "reading the prompt" in terminal.getvalue()
        for wrong in (3, "yes"):
            with pytest.raises(lily_py.InvalidArgumentError, match="progress must be"):
                engine.prefill([1], progress=wrong)  # type: ignore[arg-type]
