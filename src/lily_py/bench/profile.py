"""Where the time goes: what each kind of operation takes, and how fast it reads its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench.process import run_checkpoint_worker

CONTEXTS = (128, 2048)

OUTSIDE = "outside the backend"
"""Sampling, scheduling and Python."""


@dataclass
class OperationCost:
    """What operations of one kind took in one prompt, or for one decoded token.

    Attributes:
        seconds: in all.
        bytes: of weights and states, as if each row read its own; 0 where they are few.
    """

    seconds: float
    bytes: float


@dataclass
class ProfileResult:
    """Costs by context and operation, the longest first.

    Attributes:
        checkpoint: name of the model's folder.
        threads: compute threads.
        backend: as it describes itself.
        prefill: of a prompt of so many tokens.
        decode: of a token after so many.
        bandwidth: bytes per second that the threads read from memory, measured before and after; 0 if it
            can't be.
    """

    checkpoint: str
    threads: int
    backend: str
    prefill: dict[int, dict[str, OperationCost]] = field(default_factory=dict)
    decode: dict[int, dict[str, OperationCost]] = field(default_factory=dict)
    bandwidth: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "profile", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> ProfileResult:
        """Build from decoded JSON, whose keys are text."""
        prefill, decode = (
            {
                int(context): {name: OperationCost(**cost) for name, cost in costs.items()}
                for context, costs in values[phase].items()
            }
            for phase in ("prefill", "decode")
        )
        return ProfileResult(
            values["checkpoint"], values["threads"], values["backend"], prefill, decode, values["bandwidth"]
        )


def measure_profile(
    checkpoint_path: str,
    *,
    contexts: Sequence[int] = CONTEXTS,
    decode: int = 64,
    threads: int = 0,
    priority: bool = False,
) -> ProfileResult:
    """Measure prompts of several lengths and the tokens after them, in a process of its own.

    Raises:
        CheckpointError: the checkpoint can't be opened.
        ArmError: the process failed.
    """
    request = {
        "contexts": list(contexts),
        "decode": decode,
        "threads": threads,
    }
    values = run_checkpoint_worker(
        "lily_py.bench.profile_worker", checkpoint_path, request, priority=priority
    )
    return ProfileResult.from_json({"checkpoint": Path(checkpoint_path).name, "threads": threads, **values})


def describe_profile(result: ProfileResult) -> str:
    """Return what the tables' figures are of."""
    text = "By kind of operation, all layers together; bytes are weights and states that a token reads."
    if result.bandwidth:
        text += f" The threads read {result.bandwidth / 1e9:.1f} GB/s from memory just before and after."
    return text


def operation_costs(
    before: dict[str, int], after: dict[str, int], seconds: float, passes: int = 1
) -> dict[str, OperationCost]:
    """Return what happened between two readings of a model's counts, for each of so many passes.

    Args:
        before: counts of the CPU backend.
        after: the same later.
        seconds: between them; what no operation took is `OUTSIDE`.
        passes: that the work is divided by.
    """
    spent = {name: value - before.get(name, 0) for name, value in after.items()}
    prefix = "nanoseconds of "
    costs = {
        name.removeprefix(prefix): OperationCost(
            value / 1e9 / passes, spent[f"bytes of {name.removeprefix(prefix)}"] / passes
        )
        for name, value in spent.items()
        if name.startswith(prefix) and value
    }
    costs[OUTSIDE] = OperationCost(seconds / passes - sum(cost.seconds for cost in costs.values()), 0)
    return dict(sorted(costs.items(), key=lambda item: -item[1].seconds))


def profile_rows(costs: dict[str, OperationCost], reading: bool) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of one phase's table.

    Args:
        costs: by operation.
        reading: show how fast weights and states were read; in a prompt rows share them.
    """
    total = sum(cost.seconds for cost in costs.values())
    header = ["operation", "ms", "share", *(["MB", "GB/s"] if reading else [])]
    rows = []
    for name, cost in costs.items():
        row = [name, f"{cost.seconds * 1e3:.3f}", f"{cost.seconds / total:.1%}"]
        if reading:
            known = cost.bytes > 0
            row += (
                [f"{cost.bytes / 1e6:.1f}", f"{cost.bytes / cost.seconds / 1e9:.1f}"] if known else ["", ""]
            )
        rows.append(row)
    together = ["all", f"{total * 1e3:.3f}", ""]
    if reading:
        read = sum(cost.bytes for cost in costs.values())
        together += [f"{read / 1e6:.1f}", f"{read / total / 1e9:.1f}"]
    return header, [*rows, together]
