"""What states cost, in a process of its own: ``python -m lily_py.bench.states_worker REQUEST``."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lily_py.bench.workload import prompt_ids
from lily_py.engine import Engine
from lily_py.session import Session

OPERATIONS = ("snapshot", "go on from it", "fork", "save", "load")


def measure(engine: Engine, context: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each operation on a session of `context` tokens, and the bytes of its file."""
    vocabulary = engine.info().vocabulary
    model = engine._runtime.model
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    path = folder / "session"
    with engine.new_session() as session:
        session.append(prompt_ids(context, vocabulary).tolist(), progress=False)
        for number in range(-1, repeats):  # the first turn warms up
            times: dict[str, float] = {}
            sequence = _native(session).fork()
            model.forward(sequence, np.array([number + 1], np.int32))
            _, times["snapshot"] = _timed(sequence.snapshot)
            prefix = sequence.prefix(context + 1)
            _, times["go on from it"] = _timed(partial(model.new_sequence, prefix))
            other, times["fork"] = _timed(session.fork)
            other.close()
            _, times["save"] = _timed(partial(session.save, path))
            loaded, times["load"] = _timed(partial(engine.load_session, path))
            loaded.close()
            if number >= 0:
                for name, value in times.items():
                    seconds[name].append(value)
    return {"seconds": seconds, "file_bytes": path.stat().st_size}


def _native(session: Session) -> Any:
    state = session._state
    assert state is not None
    return state._sequence


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    with (
        Engine.load(request["checkpoint"], threads=request["threads"], progress=False) as engine,
        tempfile.TemporaryDirectory(prefix="lily-bench-") as folder,
    ):
        info = engine.info()
        contexts = {
            context: measure(engine, context, request["repeats"], Path(folder))
            for context in request["contexts"]
        }
        sizes = {"snapshot_bytes": info.recurrent_state, "token_bytes": info.kv_per_token}
        print(json.dumps({**sizes, "contexts": contexts}))


if __name__ == "__main__":
    main()
