"""Time to the first token as a conversation grows, with and without what earlier turns left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench import llama_server
from lily_py.bench.arms import Say
from lily_py.bench.llama_cpp import Setting, ensure_gguf
from lily_py.bench.process import run_worker
from lily_py.bench.workload import Spread, short
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError

TURNS = (2, 5, 10, 20)


@dataclass
class ConversationArm:
    """One program with or without reuse.

    Attributes:
        name: shown in the table.
        ttft: turn -> seconds to its first token, by round.
        cached: turn -> tokens of its prompt that weren't computed.
    """

    name: str
    ttft: dict[int, list[float]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def from_json(values: dict[str, Any]) -> ConversationArm:
        """Build from decoded JSON, whose keys are text."""
        ttft, cached = (
            {int(turn): value for turn, value in values[name].items()} for name in ("ttft", "cached")
        )
        return ConversationArm(values["name"], ttft, cached)


@dataclass
class ConversationResult:
    """Times to the first token by turn.

    Attributes:
        checkpoint: name of the model's folder.
        turns: that were measured.
        grow: tokens that each turn adds, its answer included.
        answer: tokens of each answer.
        threads: compute threads.
        arms: programs, with and without reuse.
        foreign_cores: most cores that other processes kept busy during an arm; None where it can't be told.
        notes: what wasn't measured, and why.
    """

    checkpoint: str
    turns: tuple[int, ...]
    grow: int
    answer: int
    threads: int
    arms: list[ConversationArm] = field(default_factory=list)
    foreign_cores: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "conversation", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> ConversationResult:
        """Build from decoded JSON."""
        result = ConversationResult(**{key: value for key, value in values.items() if key != "kind"})
        result.turns = tuple(values["turns"])
        result.arms = [ConversationArm.from_json(arm) for arm in values["arms"]]
        return result


def measure_conversation(
    checkpoint_path: str,
    *,
    turns: Sequence[int] = TURNS,
    grow: int = 500,
    answer: int = 32,
    threads: int = 1,
    rounds: int = 3,
    llama_settings: Sequence[Setting] = (),
    gguf_folder: Path | None = None,
    priority: bool = False,
    say: Say = lambda line: None,
) -> ConversationResult:
    """Measure fresh processes, whose order turns around from round to round.

    Args:
        llama_settings: settings of llama.cpp's server to measure too.
        gguf_folder: where GGUF files lie; None for beside the checkpoint.

    Raises:
        InvalidArgumentError: a turn that adds no more than its answer.
        ArmError: a process failed.
    """
    if not 1 <= answer < grow:
        raise InvalidArgumentError(f"answer must be between 1 and grow - 1 ({grow - 1}), got {answer}")
    checkpoint = open_checkpoint(checkpoint_path)
    result = ConversationResult(Path(checkpoint_path).name, tuple(sorted(turns)), grow, answer, threads)
    common = {
        "checkpoint": checkpoint_path,
        "vocabulary": checkpoint.config.vocab_size,
        "turns": result.turns,
        "grow": grow,
        "answer": answer,
        "threads": threads,
    }
    requests: list[tuple[str, dict[str, Any]]] = [("lily", {"program": "lily"})]
    if llama_settings and (reason := llama_server.missing_reason()):
        result.notes.append(f"llama.cpp: not measured: {reason}")
        say(result.notes[-1])
        llama_settings = ()
    if not (llama_settings or result.notes):
        result.notes.append("llama.cpp: not measured: no settings were asked for")
    for setting in llama_settings:
        file = ensure_gguf(checkpoint_path, setting.file_type, folder=gguf_folder, threads=threads)
        named = {"program": "llama.cpp", "setting": str(setting), "file": str(file)}
        requests.append((f"llama.cpp {setting}", named))
    arms = [
        (ConversationArm(f"{name}, {'reusing' if reuse else 'from nothing'}"), {**request, "reuse": reuse})
        for name, request in requests
        for reuse in (True, False)
    ]
    result.arms = [arm for arm, _ in arms]
    foreign: list[float] = []
    for number in range(rounds):
        for arm, request in arms if number % 2 == 0 else reversed(arms):
            values, finished = run_worker(
                "lily_py.bench.conversation_worker", {**common, **request}, priority=priority
            )
            for turn, seconds in values["ttft"].items():
                arm.ttft.setdefault(int(turn), []).append(seconds)
            arm.cached = {int(turn): int(count) for turn, count in values["cached"].items()}
            foreign += [] if finished.foreign_cores is None else [finished.foreign_cores]
            shown = ", ".join(f"{short(each[-1])} s at {turn}" for turn, each in arm.ttft.items())
            say(f"round {number + 1} of {rounds}: {arm.name}: {shown}")
    result.foreign_cores = max(foreign) if foreign else None
    return result


def conversation_rows(result: ConversationResult) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table: milliseconds to the first token of each turn."""
    header = ["to the first token, ms"]
    header += [f"turn {turn} ({turn * result.grow - result.answer:,} tokens)" for turn in result.turns]
    rows = []
    for arm in result.arms:
        cells = [str(Spread.of([1e3 * seconds for seconds in arm.ttft[turn]])) for turn in result.turns]
        rows.append([arm.name, *cells])
    for arm in result.arms:
        if any(arm.cached.values()):
            rows.append([f"{arm.name}: tokens computed", *_computed(result, arm)])
    return header, rows


def _computed(result: ConversationResult, arm: ConversationArm) -> list[str]:
    lengths = [turn * result.grow - result.answer for turn in result.turns]
    return [f"{length - arm.cached[turn]:,}" for turn, length in zip(result.turns, lengths, strict=True)]


def describe_conversation(result: ConversationResult) -> str:
    """Return what was done, in a sentence or two."""
    text = (
        f"Each turn adds {result.grow} tokens, {result.answer} of them the answer, and sends the whole "
        "conversation again. Reusing: what earlier turns left behind; from nothing: everything is computed."
    )
    if result.foreign_cores is not None:
        text += f" Other processes kept up to {result.foreign_cores:.2f} cores busy meanwhile."
    return text
