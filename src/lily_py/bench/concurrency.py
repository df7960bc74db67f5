"""Throughput of several requests at once in one engine, each read by a thread of its own."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench.arms import Say
from lily_py.bench.workload import prompt_ids
from lily_py.engine import Engine
from lily_py.errors import InvalidArgumentError

REQUEST_COUNTS = (1, 2, 4, 8)


@dataclass
class ConcurrencyResult:
    """Decoding speed by number of requests.

    Attributes:
        checkpoint: name of the model's folder.
        context: tokens of each prompt.
        decode: tokens generated after the first one, by each request.
        threads: compute threads.
        tokens_per_second: requests -> of all together, median of the repeats.
        rows_per_pass: requests -> how many of them a pass over the weights served, on average.
    """

    checkpoint: str
    context: int
    decode: int
    threads: int
    tokens_per_second: dict[int, float] = field(default_factory=dict)
    rows_per_pass: dict[int, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "concurrent", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> ConcurrencyResult:
        """Build from decoded JSON."""
        names = ("checkpoint", "context", "decode", "threads")
        result = ConcurrencyResult(*[values[name] for name in names])
        for name in ("tokens_per_second", "rows_per_pass"):
            setattr(result, name, {int(count): value for count, value in values[name].items()})
        return result


def measure_concurrency(
    checkpoint_path: str,
    *,
    counts: Sequence[int] = REQUEST_COUNTS,
    context: int = 128,
    decode: int = 64,
    threads: int = 0,
    repeats: int = 5,
    say: Say = lambda line: None,
) -> ConcurrencyResult:
    """Measure decoding after all prompts have been read; the counts take turns.

    Raises:
        InvalidArgumentError: a count below one.
    """
    if min(counts) < 1:
        raise InvalidArgumentError(f"request counts must be positive, got {min(counts)}")
    result = ConcurrencyResult(Path(checkpoint_path).name, context, decode, threads)
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    rows: dict[int, list[float]] = {count: [] for count in counts}
    with Engine.load(checkpoint_path, threads=threads or None, cache_bytes=0, progress=False) as engine:
        for repeat in range(-1, repeats):  # the first turn warms up
            for count in counts:
                seconds, passes = _decode_together(engine, count, context, decode)
                if repeat >= 0:
                    speeds[count].append(count * decode / seconds)
                    rows[count].append(count * decode / passes)
    for count in counts:
        result.tokens_per_second[count] = statistics.median(speeds[count])
        result.rows_per_pass[count] = statistics.median(rows[count])
        say(
            f"{count} requests: {result.tokens_per_second[count]:.1f} tokens/s together, "
            f"{result.rows_per_pass[count]:.2f} rows a pass"
        )
    return result


def _decode_together(engine: Engine, count: int, context: int, decode: int) -> tuple[float, int]:
    """Return the seconds, and the passes over the weights, from the first step to the last."""
    model = engine._runtime.model
    vocabulary = engine.info().vocabulary
    begun: list[tuple[float, int]] = []
    # Noted before anyone goes on: on a busy machine this thread may wake up late.
    barrier = threading.Barrier(count, lambda: begun.append((time.perf_counter(), model.passes)))

    def read(number: int) -> None:
        prompt = prompt_ids(context, vocabulary, first=1_000_003 * number).tolist()
        stream = engine.stream(prompt, max_tokens=decode + 1, min_tokens=decode + 1, temperature=0)
        try:
            next(stream)
            barrier.wait()
            stream.finish()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        for reader in [pool.submit(read, number) for number in range(count)]:
            reader.result()
    start, passes = begun[0]
    return time.perf_counter() - start, model.passes - passes
