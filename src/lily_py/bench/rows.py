"""What several rows cost in one pass over the weights, relative to one row; speculation lives on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lily_py.bench.arms import Say
from lily_py.bench.workload import Spread, prompt_ids
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError
from lily_py.loader import load_model

ROW_COUNTS = (1, 2, 3, 4, 5, 8)


@dataclass
class RowsResult:
    """Seconds of one pass by number of rows.

    Attributes:
        checkpoint: name of the model's folder.
        context: tokens before the measured ones.
        threads: compute threads.
        sequences: rows -> a token for each of so many sequences (`forward_each`).
        tokens: rows -> so many tokens of one sequence, with the logits of each.
    """

    checkpoint: str
    context: int
    threads: int
    sequences: dict[int, Spread] = field(default_factory=dict)
    tokens: dict[int, Spread] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "rows", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> RowsResult:
        """Build from decoded JSON."""
        tables = {
            name: {int(rows): Spread(**spread) for rows, spread in values[name].items()}
            for name in ("sequences", "tokens")
        }
        return RowsResult(values["checkpoint"], values["context"], values["threads"], **tables)


def measure_rows(
    checkpoint_path: str,
    *,
    counts: Sequence[int] = ROW_COUNTS,
    context: int = 128,
    threads: int = 0,
    repeats: int = 20,
    ablate: Sequence[str] = (),
    say: Say = lambda line: None,
) -> RowsResult:
    """Measure passes of several rows; the counts take turns, so that a disturbance hits them alike.

    Sequences have different prompts, and so do their rows: each row chooses experts of its own.

    Raises:
        InvalidArgumentError: a count below one.
    """
    if min(counts) < 1:
        raise InvalidArgumentError(f"row counts must be positive, got {min(counts)}")
    checkpoint = open_checkpoint(checkpoint_path)
    model = load_model(checkpoint, threads=threads, ablate=ablate)
    vocabulary = checkpoint.config.vocab_size
    sequences = [model.new_sequence() for _ in range(max(counts))]
    for number, sequence in enumerate(sequences):
        model.forward(sequence, prompt_ids(context, vocabulary, first=1_000_003 * number))
    seconds: dict[str, dict[int, list[float]]] = {
        "sequences": {count: [] for count in counts},
        "tokens": {count: [] for count in counts},
    }
    for repeat in range(-1, repeats):  # the first turn warms up
        for count in counts:
            ids = prompt_ids(count, vocabulary, first=500_009 + 97 * (repeat + 1))
            start = time.perf_counter()
            model.forward_each(sequences[:count], ids)
            middle = time.perf_counter()
            model.forward(sequences[0], np.roll(ids, 1), all=True)
            end = time.perf_counter()
            if repeat >= 0:
                seconds["sequences"][count].append(middle - start)
                seconds["tokens"][count].append(end - middle)
    result = RowsResult(Path(checkpoint_path).name, context, threads)
    for count in counts:
        result.sequences[count] = Spread.of(seconds["sequences"][count])
        result.tokens[count] = Spread.of(seconds["tokens"][count])
        say(
            f"{count} rows: {result.sequences[count].median * 1e3:.2f} ms over sequences, "
            f"{result.tokens[count].median * 1e3:.2f} ms over tokens"
        )
    return result
