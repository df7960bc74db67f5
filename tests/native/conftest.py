"""Fixtures of the native tests: the reference's results, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from native_support import Ids
from oracles.reference import Reference
from oracles.result import Result


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, Ids], Result]:
    """`reference(folder, ids)` in float64; the same question is answered from memory."""
    known: dict[tuple[Path, bytes], Result] = {}

    def get(path: Path, ids: Ids) -> Result:
        key = (path, ids.tobytes())
        if key not in known:
            known[key] = Reference(path).forward(ids)
        return known[key]

    return get
