"""Results on disk: a JSON file each, and for comparisons a CSV file and a picture beside it."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily_py.bench.ablate import AblateResult
from lily_py.bench.arms import Say
from lily_py.bench.concurrency import ConcurrencyResult
from lily_py.bench.conversation import ConversationResult
from lily_py.bench.machine import describe_machine
from lily_py.bench.plot import plot_run
from lily_py.bench.profile import ProfileResult
from lily_py.bench.roofline import Roofline
from lily_py.bench.rows import RowsResult
from lily_py.bench.run import RunResult
from lily_py.bench.speculation import SpeculationResult
from lily_py.bench.start import StartResult
from lily_py.bench.states import StatesResult
from lily_py.bench.workload import PHASES
from lily_py.errors import InvalidArgumentError, LilyError

Result = (
    RunResult
    | Roofline
    | RowsResult
    | AblateResult
    | StartResult
    | ConcurrencyResult
    | ConversationResult
    | StatesResult
    | ProfileResult
    | SpeculationResult
)

_KINDS: dict[str, Any] = {
    "roofline": Roofline,
    "run": RunResult,
    "profile": ProfileResult,
    "speculation": SpeculationResult,
    "rows": RowsResult,
    "ablate": AblateResult,
    "start": StartResult,
    "concurrent": ConcurrencyResult,
    "conversation": ConversationResult,
    "states": StatesResult,
}


@dataclass(frozen=True)
class Record:
    """A result with what it takes to repeat it.

    Attributes:
        name: of its files, without suffix.
        kind: such as ``run``.
        command: that made it.
        machine: that it was measured on.
    """

    name: str
    kind: str
    command: str
    machine: dict[str, Any]
    result: Result


def save(
    result: Result, folder: Path, command: str, name: str = "", say: Say = lambda line: None
) -> list[Path]:
    """Write a result's files and return them.

    Args:
        command: shown as the way to repeat it.
        name: of the files; built from kind, checkpoint and threads if empty.
        say: called with the reason if no picture can be drawn.
    """
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(result, cls))
    stem = name or _name(kind, result)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    values = {"kind": kind, "command": command, "machine": describe_machine(), "result": result.as_json()}
    path.write_text(json.dumps(values, indent=1) + "\n")
    written = [path]
    if isinstance(result, RunResult):
        written.append(write_csv(result, folder / f"{stem}.csv"))
        try:
            written.append(plot_run(result, folder / f"{stem}.png"))
        except InvalidArgumentError as error:  # the figures are saved whether or not they can be drawn
            say(f"no picture: {error}")
    return written


def load(path: Path) -> Record:
    """Read a file that `save` wrote.

    Raises:
        InvalidArgumentError: it isn't one.
    """
    try:
        values = json.loads(path.read_text())
        result = _KINDS[values["kind"]].from_json(values["result"])
        return Record(path.stem, values["kind"], values["command"], values["machine"], result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, LilyError):
            raise
        raise InvalidArgumentError(f"{path}: isn't a benchmark result ({error!r})") from error


def load_folder(folder: Path) -> list[Record]:
    """Read all results of a folder, limits first.

    Raises:
        InvalidArgumentError: there are none, or one that can't be read.
    """
    records = [load(path) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise InvalidArgumentError(f"{folder}: holds no benchmark results; make some with --save {folder}")
    order = list(_KINDS)
    return sorted(records, key=lambda record: (order.index(record.kind), record.name))


def write_csv(result: RunResult, path: Path) -> Path:
    """Write one line for each program, setting, phase, context and round."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["program", "setting", "phase", "context", "round", "tokens_per_second"])
        for arm in result.arms:
            for number, measured in enumerate(arm.rounds, 1):
                rows: Sequence[tuple[str, int, float]] = [
                    (phase, context, rate)
                    for phase in PHASES
                    for context, rate in sorted(measured.rates(phase).items())
                ]
                for phase, context, rate in rows:
                    writer.writerow([arm.program, arm.setting, phase, context, number, f"{rate:.6g}"])
    return path


def _name(kind: str, result: Result) -> str:
    if isinstance(result, Roofline):
        return kind
    threads = result.workload.threads if isinstance(result, RunResult | AblateResult) else result.threads
    return f"{kind}-{result.checkpoint}-{threads}-threads"
