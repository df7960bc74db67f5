"""What it costs to take a snapshot, to go on from one, to fork, save and load a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench.process import run_checkpoint_worker
from lily_py.bench.workload import Spread
from lily_py.memory import format_size

CONTEXTS = (128, 2048)


@dataclass
class StatesResult:
    """Seconds by operation and length of the session.

    Attributes:
        checkpoint: name of the model's folder.
        threads: compute threads.
        snapshot_bytes: of a snapshot; its keys and values are shared.
        token_bytes: of keys and values, for each token.
        seconds: operation -> tokens of the session -> spread.
        file_bytes: tokens of the session -> bytes of its file.
    """

    checkpoint: str
    threads: int
    snapshot_bytes: int
    token_bytes: int
    seconds: dict[str, dict[int, Spread]] = field(default_factory=dict)
    file_bytes: dict[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "states", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> StatesResult:
        """Build from decoded JSON, whose keys are text."""
        names = ("checkpoint", "threads", "snapshot_bytes", "token_bytes")
        result = StatesResult(*[values[name] for name in names])
        for operation, by_context in values["seconds"].items():
            result.seconds[operation] = {int(at): Spread(**spread) for at, spread in by_context.items()}
        result.file_bytes = {int(at): size for at, size in values["file_bytes"].items()}
        return result


def measure_states(
    checkpoint_path: str,
    *,
    contexts: Sequence[int] = CONTEXTS,
    threads: int = 1,
    repeats: int = 10,
    priority: bool = False,
) -> StatesResult:
    """Measure sessions of several lengths, files in the system's folder for temporary ones.

    Raises:
        CheckpointError: the checkpoint can't be opened.
        ArmError: the process failed.
    """
    request = {
        "contexts": list(contexts),
        "threads": threads,
        "repeats": repeats,
    }
    values = run_checkpoint_worker("lily_py.bench.states_worker", checkpoint_path, request, priority=priority)
    result = StatesResult(
        Path(checkpoint_path).name, threads, values["snapshot_bytes"], values["token_bytes"]
    )
    for at, found in values["contexts"].items():
        result.file_bytes[int(at)] = found["file_bytes"]
        for operation, samples in found["seconds"].items():
            result.seconds.setdefault(operation, {})[int(at)] = Spread.of(samples)
    return result


def states_rows(result: StatesResult) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table, in milliseconds."""
    contexts = sorted(result.file_bytes)
    header = ["operation, ms", *(f"{context:,} tokens" for context in contexts)]
    rows = []
    for operation, by_context in result.seconds.items():
        spreads = [by_context[context] for context in contexts]
        cells = [Spread(1e3 * s.median, 1e3 * s.low, 1e3 * s.high, s.count) for s in spreads]
        rows.append([operation, *map(str, cells)])
    rows.append(["file of the session", *(format_size(result.file_bytes[at]) for at in contexts)])
    return header, rows


def describe_states(result: StatesResult) -> str:
    """Return one line on sizes."""
    return (
        f"A snapshot takes {format_size(result.snapshot_bytes)} whatever the conversation's length; keys "
        f"and values take {format_size(result.token_bytes)} a token, shared by snapshots, forks and stored "
        "states of one conversation. Files are brought to the disk (`fsync`), their blocks checksummed."
    )
